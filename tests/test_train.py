"""The loop: settings, one exact update, runs on disk, resuming, validation, learning."""

import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from minragen import config as chosen
from minragen import games, tasks
from minragen import train as trainer
from minragen.config import ALGOS, PRESETS, Config, parse, preset
from minragen.envs import REGISTRY, EnvGroups, make
from minragen.rollout import collect, make_batch
from minragen.train import main
from minragen.warmup import DEMONSTRATION_SEED

SMALL = ["--num-groups", "2", "--group-size", "4", "--val-size", "4", "--val-every", "2",
         "--save-every", "2", "--mini-batch", "4", "--max-new-tokens", "14"]
# Episodes of one turn, where it does not matter what is played.
BRIEF = ["--env", "bandit", *SMALL]
TIMES = {"seconds", "rollout_seconds", "tokens_per_second", "elapsed", "first_turn/seconds",
         "trajectory/seconds"}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Every test has a runs/ of its own."""
    monkeypatch.setattr(chosen, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def run(*argv):
    main([*argv])


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders with a run `a`, by what it was made with: made once, for all tests that begin with
    it."""
    return tmp_path_factory.mktemp("made"), {}


@pytest.fixture
def begin(made, runs):
    """begin(options...) leaves a finished run `a` in runs/, as `run("--run", "a", ...)` would."""
    def copied(*argv):
        folder, known = made
        if argv not in known:
            run("--run", "a", *argv)
            known[argv] = folder / str(len(known))
            shutil.copytree(runs / "a", known[argv])
        else:
            shutil.copytree(known[argv], runs / "a")
    return copied


def message(*argv):
    """What a user reads who gives these options; never a traceback."""
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    assert str(stop.value).startswith("error: ") and "\n" not in str(stop.value)
    return str(stop.value)


def settings(*argv):
    return parse([*argv])[0]


class TestSettings:
    PREREQUISITES = {
        "env_arg": ["--env", "bandit"], "gamma": ["--algo", "ppo"], "lam": ["--algo", "ppo"],
        **dict.fromkeys(["grounding_reward", "worldmodeling_reward"],
                        ["--response-format", "grounding_worldmodeling"]),
        **dict.fromkeys(["critic_lr", "value_clip", "advantage_mask", "loss_mask"],
                        ["--algo", "ppo"]),
        "gamma_turn": ["--algo", "bi-level"], "window": ["--context", "limited"],
        "reward_norm_over": ["--reward-norm", "mean"], "kl_estimator": ["--kl-coef", "0.1"],
        "kl_target": ["--kl-reward-coef", "0.1"],
        "kl_horizon": ["--kl-reward-coef", "0.1", "--kl-target", "0.1"],
        "resample": ["--filter-value", "1"]}

    def test_every_field_is_an_option(self):
        special = {"env": "bandit", "model": "tiny", "device": "cpu", "run": "x",
                   "dual_clip": "1.5", "env_arg": "high_prob=0.5", "kl_estimator": "k2",
                   "kl_target": "0.1", "kl_horizon": "2", "credit": "episode"}
        for f in dataclasses.fields(Config):
            value = special.get(f.name) or (
                f.metadata["choices"][-1] if f.metadata["choices"] else
                str(not f.default) if f.type is bool else "3" if f.type is int else "0.5")
            argv = self.PREREQUISITES.get(f.name, [])
            got = getattr(settings(*argv, "--" + f.name.replace("_", "-"), value), f.name)
            assert got == (("high_prob=0.5",) if f.name == "env_arg" else
                           value == "True" if f.type is bool else f.type(value))

    def test_every_field_says_what_it_is(self):
        assert all(len(f.metadata["help"]) > 10 for f in dataclasses.fields(Config))

    def test_every_environment_has_a_preset_and_every_preset_an_environment(self):
        assert set(PRESETS) == set(REGISTRY)

    @pytest.mark.parametrize("env", sorted(PRESETS))
    @pytest.mark.parametrize("algo", sorted(ALGOS))
    def test_a_preset_is_valid_as_it_stands(self, env, algo):
        chosen.check(preset(env, algo))

    def test_a_mixture_takes_the_larger_of_each_presets_numbers(self):
        mixed = preset("frozenlake,bandit")
        assert mixed.max_context == max(PRESETS[e]["max_context"] for e in ("frozenlake", "bandit"))
        # What only one of them prefers is not forced upon the others, nor upon an algorithm.
        assert preset("webshop").aggregation == "seq-mean-token-mean"
        assert preset("webshop,frozenlake").aggregation == Config().aggregation == "token-mean"
        assert preset("webshop", "dapo").aggregation == "token-mean"

    def test_a_format_that_describes_the_state_has_room_for_it(self):
        plain, both = (settings("--response-format", name)
                       for name in ("no_think", "grounding_worldmodeling"))
        for name, more in chosen.DESCRIPTION.items():
            assert getattr(both, name) == getattr(plain, name) + 2 * more
        assert getattr(settings(), name) == getattr(plain, name) == PRESETS["frozenlake"][name]

    def test_what_differs_from_the_preset_is_known(self):
        _, _, changed, _ = parse(["--env", "bandit", "--lr", "0.5", "--seed", "3", "--algo", "ppo"])
        assert changed == {"lr": 0.5}

    @pytest.mark.parametrize("argv, said", [
        (["--env", "frozenlak"],
         "unknown env 'frozenlak': did you mean 'frozenlake'? Known: bandit, countdown"),
        (["--model", "smolm2"], "unknown model 'smolm2': did you mean 'smollm2'"),
        (["--learning-rate", "1"], "unknown option '--learning-rate'"),
        (["--group-sise", "1"], "did you mean '--group-size'"),
        (["--algo", "grop"], "unknown algo 'grop': did you mean 'grpo'"),
        (["--lr", "fast"], "invalid float value: 'fast'"),
        (["--norm-by-std", "maybe"], "expected true or false"),
        (["--steps", "0"], "steps: got 0, expected at least 1"),
        (["--group-size", "1"], "grpo compares the members of a group"),
        (["--temperature", "0"], "temperature: got 0.0, expected at least 0.0001"),
        (["--temperature", "nan"], "temperature: got nan, expected a finite number"),
        (["--entropy-coef", "inf"], "entropy_coef: got inf, expected a finite number"),
        (["--threads", "100000"], "threads: got 100000, expected at most"),
        (["--max-context", "99999999999999999999"], "expected at most"),
        (["--device", "xpu"], "unknown device 'xpu'"),
        (["--env", ":x"], "bad env ':x': expected package.module:Class"),
        (["--env", "minragen.envs:TextEnv"], "is the base of environments"),
        (["--env", "frozenlake=²"], "give a number of groups to every environment"),
        (["--env-arg", "split=val"], "'split' is not an option of an environment"),
        (["--env", "bandit", "--env-arg", "low_reward=1e400"], "expected float"),
        (["--env-arg", "size=100000"], "expected size of 2 to 64"),
        (["--max-context", "120"], "has 12"),
        (["--run", "x" * 300], "up to 100 letters"),
        (["--env-arg", "slip"], "expected name=value"),
        (["--response-format", "worldmodelling"],
         "unknown response_format 'worldmodelling': did you mean 'worldmodeling'"),
        (["--grounding-reward", "1"], "pays for the observation, which the response_format "
                                      "free_think does not have. Use --response-format grounding "
                                      "or grounding_worldmodeling."),
        (["--response-format", "grounding", "--worldmodeling-reward", "1"],
         "Use --response-format worldmodeling or grounding_worldmodeling."),
        (["--env", "frozenlake,bandit", "--response-format", "grounding", "--grounding-reward",
          "1"], "grounding_reward: the environment bandit has no relations"),
        (["--response-format", "grounding", "--grounding-reward", "-1"], "expected at least 0"),
        (["--env-arg", "slipp=0.1"], "did you mean 'slip'"),
        (["--env-arg", "slip=wet"], "expected float"),
        (["--env-arg", "slip=2"], "bad options of FrozenLake"),
        (["--env", "frozenlake=3,bandit=4"], "expected 16 in all"),
        (["--env", "no.such.module:Env"], "No module named 'no'"),
        (["--kl-coef", "1", "--kl-estimator", "k1"], "k1 as a loss has a gradient of expectation"),
        (["--dual-clip", "0.5"], "got dual_clip=0.5, expected more than 1"),
        (["--filter-value", "0.005"], "filter top_p: got a value of 0.005"),
        (["--filter", "topk"], "unknown filter 'topk': did you mean 'top_k'"),
        (["--filter-metric", "reward"], "rewards may be negative"),
        (["--advantages", "rloo", "--group-size", "1"], "rloo compares the members of a group"),
        (["--credit", "turn"], "grpo compares whole episodes"),
        (["--algo", "ppo", "--reward-norm", "mean"], "reward_norm mean normalises the returns"),
        (["--algo", "bi-level", "--context", "limited"], "expected full"),
        (["--kl-target", "0.1"], "kl_target: got 0.1, but it takes no part here"),
        (["--gamma", "0.9"], "It needs advantages gae, bi_level_gae or a REINFORCE"),
        (["--loss-mask", "all"], "loss_mask: got all, but it takes no part here"),
        (["--filter", "none", "--filter-metric", "length"], "It needs a filter"),
        (["--algo", "ppo", "--group-size", "1"], "the spread within a group"),
        (["--resample", "2"], "filter top_p with filter_value 1"),
        (["--algo", "gspo", "--advantages", "rloo", "--ratio", "sequence",
          "--filter", "top_k_abs", "--filter-value", "2.5"], "expected a whole number"),
        (["--algo", "ppo", "--ratio", "sequence"], "one advantage per row"),
        (["--clip-low", "-1"], "clip_low: got -1.0, expected at least 0"),
        (["--lam", "1.5"], "lam: got 1.5, expected at most 1"),
        (["--seed", "99999999"], "seed: got 99999999, expected at most"),
        (["--env", "frozenlake,bandit", "--val-size", "1"],
         "expected 1 in all and at least one each"),
        (["--max-context", "50"], "max_context is 50: no room for a reply"),
        (["--resume"], "--resume needs --run NAME"),
        (["--run", "nothing", "--resume"], "unknown run 'nothing'"),
        (["--device", "cuda:7"], "sees no GPU"),
    ])
    def test_bad_input_gets_one_sentence(self, argv, said):
        if "cuda:7" in argv and torch.cuda.is_available():
            pytest.skip("there is a GPU")
        assert said in message(*argv)


@functools.cache
def base(env):
    """The policy and frame that a run of the environment begins with; nobody may change them."""
    learner = trainer.build(settings(*SMALL, "--env", env), None, lambda line: None)
    return learner.policy, learner.frame


@functools.cache
def episodes(env, context, window):
    """Three groups of four, played by the base."""
    policy, frame = base(env)
    return collect(policy, frame, EnvGroups(env, 3, 4), 5, trainer.Sampling(), 0, 14, 512,
                   context=context, window=window)


def learner_and_batch(*argv):
    config = settings(*SMALL, "--num-groups", "3", *argv)
    policy, _ = base(config.env)
    with (mock.patch.object(trainer, "build_policy", lambda *_: dataclasses.replace(
            policy, model=copy.deepcopy(policy.model))),
          mock.patch.object(trainer, "warm_start", lambda *_: None)):
        learner = trainer.build(config, None, lambda line: None)
    batch = make_batch(episodes(config.env, config.context, config.window))
    batch.rewards[batch.rewards != 0] += 0.1  # make sure that there is something to learn
    batch.episode_returns += torch.arange(12.0)[batch.episode_ids] % 3
    return config, learner, batch


class TestAlgorithms:
    def test_each_is_a_difference_from_the_base_that_can_be_printed(self, capsys):
        for name, choices in ALGOS.items():
            with pytest.raises(SystemExit) as stop:
                parse(["--env", "frozenlake", "--algo", name, "--print-config"])
            above, below = capsys.readouterr().out.split("the rest is the base")
            assert stop.value.code is None
            for field, value in choices.items():
                line = next((x for x in above.splitlines()
                             if x.split(" ")[0] == field.replace("_", "-")), "")
                assert (line.endswith(f"through algo {name}")
                        or value == getattr(Config(), field) and not line)
            assert ("\nadvantages" in above) == ("advantages" in choices)

    def test_a_run_says_too_what_it_would_go_on_with(self, runs, capsys):
        run("--run", "a", "--steps", "1", *BRIEF)
        with pytest.raises(SystemExit):
            parse(["--run", "a", "--resume", "--print-config"])
        assert "num-groups             2 " in capsys.readouterr().out

    def test_no_two_are_the_same(self):
        made = [dataclasses.replace(preset("frozenlake", name), algo="") for name in ALGOS]
        assert len(set(made)) == len(ALGOS)

    @pytest.mark.parametrize("algo", ALGOS)
    def test_each_gives_finite_gradients_and_advantages_on_sampled_tokens_only(self, algo):
        config, learner, batch = learner_and_batch("--algo", algo)
        result = trainer.update(learner, batch, config, 1)
        assert all(map(math.isfinite, result.values())) and result["grad_norm"] > 0
        trainer.prepare(learner, batch, config)
        assert batch.advantages.isfinite().all() and batch.advantages.any()
        assert not batch.advantages[~batch.response_mask].any()

    def test_dynamic_sampling_plays_on_until_enough_groups_have_spread_or_the_cap(self):
        config, learner, _ = learner_and_batch("--algo", "dapo", "--env", "bandit")
        groups = trainer.build_groups(config, "train", 3, 4)
        played = trainer.roll_out(learner, config, groups, trainer.Bar(""))
        rounds = len(played) // 12
        assert learner.rounds == rounds and {t.group_id for t in played} == set(range(3 * rounds))
        assert len({t.seed for t in played}) == 3 * rounds
        batch = make_batch(played)
        kept, metrics = trainer.choose_groups(learner, batch, config)
        spread = [len({t.episode_return for t in played if t.group_id == g}) > 1
                  for g in range(3 * rounds)]
        first = [g for g, s in enumerate(spread) if s][:3]
        assert kept.nonzero()[:, 0].tolist() == first and metrics["rollouts"] == rounds
        assert rounds == 1 + config.resample or sum(spread) >= 3
        assert rounds == 1 or sum(spread[:3 * rounds - 3]) < 3

    def test_an_adaptive_kl_coefficient_falls_while_the_policy_is_the_reference(self):
        config, learner, batch = learner_and_batch(
            "--kl-reward-coef", "0.1", "--kl-target", "1", "--kl-horizon", "12")
        metrics = trainer.update(learner, batch, config, 1)
        assert metrics["kl_reward_coef"] == 0.1 and abs(metrics["kl_reward"]) < 1e-5
        assert learner.kl_reward_coef == pytest.approx(0.1 * 0.8)

    def test_a_kl_in_the_reward_costs_the_tokens_that_the_reference_finds_unlikely(self):
        config, learner, batch = learner_and_batch("--algo", "reinforce-pp", "--reward-norm",
                                                   "identity", "--kl-reward-coef", "0.5")
        trainer.prepare(learner, batch, config)
        mask, plain = batch.response_mask, trainer.credit(learner, batch, config)
        batch.ref_logprobs = batch.ref_logprobs - 0.25 * mask
        scores, rewards, _ = trainer.credit(learner, batch, config)
        assert torch.allclose(rewards - plain[1], -0.125 * mask, atol=1e-6)
        assert torch.allclose(scores - plain[0], -0.125 * mask.sum(dim=1), atol=1e-4)

    def test_loss_and_advantages_can_be_taken_over_all_tokens(self):
        config, learner, batch = learner_and_batch(
            "--algo", "bi-level", "--loss-mask", "all", "--advantage-mask", "all")
        result = trainer.update(learner, batch, config, 1)
        trainer.prepare(learner, batch, config)
        given = batch.attention_mask & ~batch.response_mask
        given[:, 0] = False
        assert batch.advantages[given].any() and batch.old_logprobs[given].all()
        assert all(map(math.isfinite, result.values()))

    @pytest.mark.parametrize("metric", ["reward", "length", "entropy", "entropy_std"])
    def test_groups_can_be_chosen_by_other_scores(self, metric):
        config, learner, batch = learner_and_batch("--filter", "top_k", "--filter-value", "0.4",
                                                   "--filter-metric", metric)
        kept, _ = trainer.choose_groups(learner, batch, config)
        assert kept.sum() == 1


class TestContexts:
    @pytest.mark.parametrize("context", ["limited", "single_turn"])
    @pytest.mark.parametrize("algo", ["grpo", "ppo", "reinforce-pp"])
    def test_every_turn_is_a_row_and_every_episode_counts_once(self, context, algo):
        config, learner, batch = learner_and_batch("--algo", algo, "--context", context,
                                                   "--window", "2")
        turns = batch.turn_ids.amax(dim=1)
        assert len(batch) > 12 and (batch.turn_ids[batch.response_mask].unique() >= 0).all()
        assert all(len(set(row[row >= 0].tolist())) == 1 for row in batch.turn_ids)
        result = trainer.update(learner, batch, config, 1)
        assert all(map(math.isfinite, result.values()))
        trainer.prepare(learner, batch, config)
        if algo == "grpo":  # an episode's turns share its advantage, which is that of full context
            first = (turns == 0).nonzero()[:, 0]
            alone = batch.take(first)
            trainer.prepare(learner, alone, config)
            of_episode = torch.stack([r[m][0] for r, m in zip(alone.advantages,
                                                             alone.response_mask)])
            for row, mask, episode in zip(batch.advantages, batch.response_mask,
                                          batch.episode_ids):
                assert torch.allclose(row[mask], of_episode[episode])

    def test_credit_per_turn_pays_a_turn_for_itself_and_what_came_later(self):
        config, learner, batch = learner_and_batch("--algo", "reinforce-pp", "--credit", "turn",
                                                   "--context", "limited", "--gamma-turn", "0.5",
                                                   "--kl-reward-coef", "0")
        _, rewards, _ = trainer.credit(learner, batch, config)
        own, turns = batch.rewards.sum(dim=1), batch.turn_ids.amax(dim=1)
        for episode in batch.episode_ids.unique():
            rows = (batch.episode_ids == episode).nonzero()[:, 0].tolist()
            assert turns[rows].tolist() == list(range(len(rows)))
            for k, row in enumerate(rows):
                later = sum(0.5**j * float(own[r]) for j, r in enumerate(rows[k:]))
                assert float(rewards[row].sum()) == pytest.approx(later, abs=1e-6)

    def test_the_format_penalty_is_in_the_credit_of_either_kind(self):
        for credit, algo in (("episode", "ppo"), ("turn", "ppo")):
            config, learner, batch = learner_and_batch("--algo", algo, "--credit", credit)
            batch.rewards = torch.zeros_like(batch.rewards)
            ends = trainer.starpo.turn_ends(batch.turn_ids, batch.response_mask)
            batch.rewards[ends] = -0.1  # every turn was malformed
            batch.episode_returns = batch.rewards.sum(dim=1)
            _, rewards, _ = trainer.credit(learner, batch, config)
            assert torch.allclose(rewards.sum(dim=1), batch.episode_returns)
            assert int((rewards != 0).sum()) == (12 if credit == "episode" else int(ends.sum()))


class TestUpdate:
    @pytest.mark.parametrize("algo", ["grpo", "ppo", "gspo", "dr-grpo", "turn-ppo"])
    def test_the_micro_batch_size_does_not_change_the_gradient(self, algo):
        gradients = []
        given, learner, batch = learner_and_batch("--algo", algo, "--kl-coef", "0.1")
        for token_budget in (1, 700, 10**9):
            config = dataclasses.replace(given, token_budget=token_budget)
            trainer.prepare(learner, batch, config)
            batch, count = trainer.weigh(batch, config), 0
            for rows in trainer.micro_batches(batch.lengths, token_budget):
                trainer.backward(learner, batch.take(rows), config)
                count += 1
            trained = [*learner.policy.model.parameters(),
                       *(learner.critic.parameters() if learner.critic else ())]
            gradients.append((count, [p.grad for p in trained]))
            for p in trained:
                p.grad = None
        assert gradients[0][0] == 12 and gradients[1][0] > 2 and gradients[2][0] == 1
        for _, other in gradients[1:]:
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients[0][1], other))

    def test_micro_batches_hold_every_row_once_within_the_budget(self):
        lengths = torch.tensor([5, 900, 30, 30, 2, 400])
        parts = list(trainer.micro_batches(lengths, 450))
        assert sorted(torch.cat(parts).tolist()) == list(range(6))
        assert all(len(p) == 1 or len(p) * lengths[p].max() <= 450 for p in parts)

    def test_on_cpu_the_learner_agrees_with_the_sampler_to_1e_5(self):
        config, learner, batch = learner_and_batch()
        assert trainer.update(learner, batch, config, 1)["logprob_gap"] < 1e-5

    def test_in_bfloat16_old_logprobs_are_computed_again_and_in_float32_they_are_the_samplers(self):
        config, learner, batch = learner_and_batch()
        trainer.prepare(learner, batch, config)
        assert batch.old_logprobs is batch.sample_logprobs
        learner.policy.model.to(torch.bfloat16)
        trainer.prepare(learner, batch, config)
        again, _ = trainer.token_logprobs(learner.policy.model, batch.tokens, batch.response_mask)
        assert (torch.allclose(batch.old_logprobs, again, atol=1e-2)
                and not batch.old_logprobs.equal(batch.sample_logprobs))

    def test_the_first_step_is_on_policy(self):
        config, learner, batch = learner_and_batch("--mini-batch", "100")
        result = trainer.update(learner, batch, config, 1)
        assert result["clip_fraction"] == 0 and abs(result["approx_kl"]) < 1e-8

    def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(self):
        config, learner, batch = learner_and_batch("--mini-batch", "100", "--entropy-coef", "0")
        trainer.update(learner, batch, config, 1)
        after, _ = trainer.token_logprobs(learner.policy.model, batch.tokens, batch.response_mask)
        change = (after - batch.old_logprobs) * batch.advantages
        assert change.sum() > 0

    def test_the_reference_and_the_critic_exist_only_when_used(self):
        _, plain, _ = learner_and_batch()
        _, full, _ = learner_and_batch("--algo", "ppo", "--kl-coef", "0.1")
        assert plain.reference is None and plain.critic is None
        assert full.reference is not None and full.critic is not None

    def test_the_kl_to_the_reference_starts_at_zero_and_the_reference_stays(self):
        config, learner, batch = learner_and_batch("--kl-coef", "0.1", "--mini-batch", "4")
        before = [p.clone() for p in learner.reference.parameters()]
        first = trainer.update(learner, batch.take(torch.arange(4)), config, 1)["kl_ref"]
        second = trainer.update(learner, batch, config, 2)["kl_ref"]
        assert first < 1e-9 < second
        assert all(torch.equal(a, b) for a, b in zip(before, learner.reference.parameters()))

    def test_learning_rates_fall_linearly_to_their_final_share(self):
        config, learner, batch = learner_and_batch("--lr", "1e-3", "--lr-final", "0.1",
                                                   "--steps", "11")
        rates = []
        for step in (1, 6, 11):
            trainer.update(learner, batch, config, step)
            rates.append(learner.optimizer.inner.param_groups[0]["lr"])
        assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4])


class TestRuns:
    def test_a_run_leaves_config_metrics_trajectories_and_a_checkpoint(self, runs, begin):
        begin("--steps", "2", *BRIEF)
        assert {p.name for p in (runs / "a").iterdir()} == {
            "config.json", "metrics.jsonl", "trajectories.jsonl", "checkpoint"}
        lines = metrics(runs / "a")
        assert [line["step"] for line in lines] == [0, 1, 2, 2]
        assert "val/success_greedy" in lines[0] and "test/success" in lines[-1]
        first = json.loads((runs / "a" / "trajectories.jsonl").read_text().splitlines()[0])
        assert [m["role"] for m in first["messages"][:3]] == ["system", "user", "assistant"]

    def test_metrics_are_json_numbers_with_the_consoles_names(self, runs, capsys):
        run("--run", "a", "--steps", "1", *BRIEF)
        assert all(isinstance(v, (int, float))
                   for line in metrics(runs / "a") for name, v in line.items() if name != "regime")
        printed = capsys.readouterr().out
        assert ("memory    about" in printed and "differ from the preset" in printed
                and "no GPU" in printed)

    @pytest.mark.parametrize("env, algo", [("frozenlake", "grpo"), ("bandit", "ppo")])
    def test_resuming_equals_never_having_stopped_bit_for_bit(self, runs, env, algo):
        options = [*SMALL, "--env", env, "--algo", algo, "--kl-coef", "0.01", "--lr-final", "1"]
        run("--run", "straight", "--steps", "4", *options)
        run("--run", "stopped", "--steps", "2", *options)
        run("--run", "stopped", "--resume", "--steps", "4")
        one, two = metrics(runs / "straight"), metrics(runs / "stopped")
        assert one == two and len(one) == 6
        weights = [torch.load(runs / n / "checkpoint" / "trainer.pt", weights_only=True)
                   for n in ("straight", "stopped")]
        flat = [json.dumps(w, default=lambda t: t.tolist(), sort_keys=True) for w in weights]
        assert flat[0] == flat[1]
        same = [(runs / n / "checkpoint" / "model.safetensors").read_bytes()
                for n in ("straight", "stopped")]
        assert same[0] == same[1]

    def test_the_same_seed_gives_the_same_run_and_another_one_another(self, runs):
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
            run("--run", name, "--seed", seed, "--steps", "1", *BRIEF)
        a, b, c = (metrics(runs / n) for n in "abc")
        assert a == b and a[1:] != c[1:]

    def test_an_existing_run_is_not_overwritten(self, runs, begin):
        begin("--steps", "1", *BRIEF)
        before = (runs / "a" / "metrics.jsonl").read_text()
        assert ("run 'a' exists already. Go on with --run a --resume"
                in message("--run", "a", *BRIEF))
        assert (runs / "a" / "metrics.jsonl").read_text() == before

    def test_a_run_without_a_name_gets_a_new_one_each_time(self, runs):
        for _ in range(2):
            run("--steps", "1", *BRIEF)
        assert {p.name for p in runs.iterdir()} == {"bandit-grpo-tiny-s0", "bandit-grpo-tiny-s0-2"}

    def test_resuming_with_other_settings_is_refused(self, begin):
        begin("--steps", "1", *BRIEF)
        assert "lr was 0.0003, got 0.5" in message("--run", "a", "--resume", "--lr", "0.5")

    def test_a_run_goes_on_with_its_own_options_repeated_and_never_takes_steps_back(self, runs):
        own = ["--env-arg", "high_prob=0.5", "--warmup-steps", "0"]
        run("--run", "a", "--steps", "2", *BRIEF, *own)
        run("--run", "a", "--resume", "--steps", "3", *own)
        assert "set to 3, got 2" in message("--run", "a", "--resume", "--steps", "2")
        assert "set to 3, got -1" in message("--run", "a", "--resume", "--steps", "-1")

    def test_a_run_name_must_be_one_plain_folder(self):
        for name in ("../x", "a/b", ".", "a b"):
            assert "run" in message("--run", name, *SMALL)

    @pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "tokenizer.json",
                                      "manifest.json"])
    @pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
    def test_a_damaged_checkpoint_is_refused_by_name(self, runs, begin, file, how):
        begin("--steps", "1", *BRIEF)
        path = runs / "a" / "checkpoint" / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:len(data) // 2] if how == "cut" else data)
        said = message("--run", "a", "--resume", "--steps", "2")
        assert "damaged" in said or "no checkpoint" in said

    def test_a_kill_between_the_two_renames_leaves_a_whole_checkpoint(self, runs, begin):
        begin("--steps", "2", *BRIEF)
        (runs / "a" / "checkpoint").rename(runs / "a" / "checkpoint.new")
        run("--run", "a", "--resume", "--steps", "3", "--device", "cpu")
        assert metrics(runs / "a")[-1]["step"] == 3 and (runs / "a" / "checkpoint").exists()

    def test_a_kill_while_the_save_after_that_is_written_leaves_a_whole_one_too(
            self, runs, begin, monkeypatch):
        begin("--steps", "2", *BRIEF)
        (runs / "a" / "checkpoint").rename(runs / "a" / "checkpoint.new")
        monkeypatch.setattr(trainer.torch, "save",
                            lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit, match="stopped"):
            main(["--run", "a", "--resume", "--steps", "4"])
        monkeypatch.undo()
        monkeypatch.setattr(chosen, "RUNS", runs)
        run("--run", "a", "--resume")
        assert metrics(runs / "a")[-1]["step"] == 4

    def test_a_checkpoint_that_was_never_finished_is_not_taken(self, runs, begin):
        begin("--steps", "1", *BRIEF)
        (runs / "a" / "checkpoint" / "manifest.json").unlink()
        assert "has no checkpoint" in message("--run", "a", "--resume")

    def test_lines_after_the_checkpoint_and_cut_off_lines_are_forgotten_on_resume(
            self, runs, begin):
        begin("--steps", "2", *BRIEF)
        with open(runs / "a" / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "success": 1.0}\n{"step": 4, "succ')
        run("--run", "a", "--resume", "--steps", "3")
        assert [line["step"] for line in metrics(runs / "a")] == [0, 1, 2, 3, 3]

    @pytest.mark.parametrize("text", ["[1]", "null", '{"steps": "a"}', '{"env": 5}', "{",
                                      '{"stepz": 1}'])
    def test_a_config_that_is_none_is_refused_by_name(self, runs, text):
        (runs / "a").mkdir(parents=True)
        (runs / "a" / "config.json").write_text(text)
        assert "a/config.json cannot be read" in message("--run", "a", "--resume")

    @pytest.mark.parametrize("text", ["[]", "null", '{"files": []}', '{"files": {"a": 1}}', "{}"])
    def test_a_manifest_that_is_none_is_refused(self, runs, text):
        (runs / "a" / "checkpoint").mkdir(parents=True)
        (runs / "a" / "checkpoint" / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            trainer.find_checkpoint(runs / "a")

    def test_an_update_without_a_finite_gradient_stops_the_run(self):
        config, learner, batch = learner_and_batch("--lr", "1e6", "--mini-batch", "100")
        with pytest.raises(RuntimeError, match="the policy has diverged"):
            for step in range(1, 30):
                trainer.update(learner, batch, config, step)

    def test_a_run_whose_filter_stays_empty_stops_says_why_and_plays_no_step_when_resumed(
            self, runs, capsys):
        run("--env", "frozenlake", "--run", "a", "--steps", "9", *SMALL, "--env-arg", "frozen=1.0",
            "--max-turns", "1", "--warmup-steps", "0")
        assert "the filter (top_p of reward_std) kept no group" in capsys.readouterr().out
        before = metrics(runs / "a")
        assert [line["step"] for line in before][:-1] == [0, 1, 2, 3, 4, 5]
        run("--run", "a", "--resume")
        assert metrics(runs / "a") == before


class TestValidation:
    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_training_and_validation_share_no_instance(self, env):
        seen = {}
        for split, first in (("train", trainer.TRAIN_SEED), ("val", 0), ("test", 0)):
            groups = EnvGroups(env, 200, 1, split)
            groups.reset(first)
            seen[split] = {e.instance() for e in groups.envs}
        assert (not seen["train"] & seen["val"] and not seen["train"] & seen["test"]
                and not seen["val"] & seen["test"])

    def test_a_mixture_reports_every_environment(self, runs):
        run("--env", "frozenlake,bandit", "--run", "mix", "--steps", "1", "--warmup-steps", "1",
            *SMALL)
        first, step = metrics(runs / "mix")[:2]
        assert {"val/frozenlake/success", "val/bandit/success_greedy"} <= set(first)
        assert {"frozenlake/success", "bandit/episode_return"} <= set(step)

    def test_steps_and_seeds_never_play_the_same_training_seed(self):
        most = settings("--steps", str(trainer.TRAIN_SEED_STRIDE // 16))
        firsts = [trainer.TRAIN_SEED + seed * trainer.TRAIN_SEED_STRIDE for seed in range(3)]
        ends = [first + most.steps * most.num_groups for first in firsts]
        assert ends[0] <= firsts[1] and ends[1] <= firsts[2]
        assert most.val_size < DEMONSTRATION_SEED and firsts[0] > DEMONSTRATION_SEED + 400 * 64


class TestLearning:
    def test_bandit_learns_the_better_arm_of_known_pairs_in_the_order_not_trained_on(self, runs):
        """The whole algorithm at work: from weak play to the better arm in a few steps."""
        run("--env", "bandit", "--run", "learns", "--steps", "14", "--val-every", "14",
            "--val-size", "64")
        lines = metrics(runs / "learns")
        assert lines[0]["val/success"] < 0.85 and lines[-2]["val/success"] > 0.93


class TestMetrics:
    def documented(self):
        """The keys in the first columns of docs/metrics.md, SAMPLER and BUCKET spelt out."""
        page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
        cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
        keys = {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}
        for word, names in (("SAMPLER", ("first_turn", "trajectory")),
                            ("BUCKET", ("all", "bucket_1", "bucket_2"))):
            keys = {key.replace(word, name) for key in keys for name in names}
        return keys

    def pattern(self, key):
        """The key as the page writes it."""
        for found, written in ((r"(val|test)/(bandit|frozenlake)/", "SPLIT/ENV/"),
                               (r"(val|test)/", "SPLIT/"),
                               (r"(bandit|frozenlake)/.*", "ENV/METRIC"),
                               (r"gradient/bucket_(?!1/)\d+/", "gradient/bucket_2/")):
            key = re.sub(f"^{found}", written, key)
        return key

    def bought(self):
        """What webshop reports of a purchase."""
        env, over = make("webshop"), False
        env.reset(seed=1)
        while not over:
            *_, over, _, info = env.step(env.solve()[0])
        return set(info)

    def test_the_documented_keys_are_the_logged_ones(self, runs):
        small = ["--num-groups", "16", "--group-size", "2", "--val-size", "4", "--steps", "1",
                 "--max-new-tokens", "24"]
        run("--env", "frozenlake", "--run", "c", *small)
        small += ["--warmup-steps", "1", "--diagnose-every", "0"]
        run("--env", "frozenlake", "--run", "a", *small, "--algo", "ppo", "--kl-coef", "0.1",
            "--kl-reward-coef", "0.1", "--overlong", "0.5", "--gradients-every", "1",
            "--response-format", "grounding_worldmodeling", "--filter", "none")
        run("--env", "bandit,frozenlake", "--run", "b", *small, "--resample", "1",
            "--filter-value", "1")
        logged = {key for name in "abc" for line in metrics(runs / name) for key in line} | TIMES
        for module in (games, tasks):  # what single environments report
            logged |= set(re.findall(r'metrics=\{"(\w+)"', inspect.getsource(module)))
        logged |= {"f1"} | self.bought()
        seen = {self.pattern(key) for key in logged}
        assert {key.partition("/")[2] for key in logged if key.startswith("bandit/")} <= logged
        assert seen == self.documented()
