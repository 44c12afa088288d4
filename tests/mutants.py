"""Mutants: wrong lines that the tests must notice, each tried by itself on a copy of the project.

    make mutants                                     # the table below, then a generic sample
    .venv/bin/python tests/mutants.py --only train   # only files whose name holds `train`

A row is (text, wrong text, what is then wrong). Its text stands exactly once in its file; a row
whose text is gone is an error, so the table has to move with the code. The sample is drawn from all
mutants that cosmic-ray makes of the package, with the commit's hash as seed. Results:
runs/readme-mutants.json.

Every mutant runs in a forked process that has imported torch and transformers already, which makes
hundreds of them affordable. It dies when a test fails, when nothing can be collected, or when the
tests take longer than TIME_LIMIT.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
COPIED = ("minragen", "tests", "docs", "benchmarks", "runs", "README.md", "Makefile",
          "CONTRIBUTING.md",
          "pyproject.toml", "requirements.lock", "LOG.md", ".gitignore")
TIME_LIMIT = 300.0  # seconds of wall-clock time for the tests of one mutant
MEMORY_LIMIT = 16 * 2**30  # bytes of address space, so that a runaway mutant is stopped early
SAMPLE = 150
LEAST_SHARE = 0.85  # of the generic sample that must die
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama", "gymnasium",
             "matplotlib.figure", "hypothesis", "pytest", "safetensors.torch")

CONTRACT = "test_env_contract.py test_bundled.py"
# The tests run on a generic mutant of a file, the likeliest to fail first.
TESTS = {
    "bundled.py": "test_bundled.py test_models.py",
    "chat.py": "test_models.py test_rollout.py test_diagnostics.py environments/test_relations.py",
    "config.py": "test_config.py test_step.py test_train.py test_eval.py",
    "diagnostics.py": "test_diagnostics.py test_train.py test_eval.py", "eval.py": "test_eval.py",
    "envs.py": f"test_envs.py environments/test_frozenlake.py test_museum.py {CONTRACT}",
    "models.py": "test_models.py test_museum.py test_rollout.py test_step.py",
    "rollout.py": "test_rollout.py test_step.py environments/test_relations.py test_museum.py",
    "runs.py": "test_train.py test_config.py test_eval.py",
    "starpo.py": "test_starpo.py test_museum.py test_step.py",
    "train.py": "test_step.py test_train.py test_museum.py",
    **{f"environments/{name}.py": f"environments/test_{name}.py {CONTRACT}" for name in (
        "bandit", "frozenlake", "sokoban", "sudoku", "countdown", "metamathqa", "searchqa",
        "webshop", "deepcoder", "lean")},
    "environments/board.py": "environments/test_relations.py environments/test_frozenlake.py "
                             f"environments/test_sokoban.py {CONTRACT}",
    "environments/data.py": "environments/test_countdown.py environments/test_metamathqa.py "
                            "environments/test_searchqa.py environments/test_lean.py",
    "environments/gymnasium_text.py": "test_envs.py",
    "environments/search.py": "environments/test_searchqa.py environments/test_webshop.py",
    "environments/sandbox.py": "environments/test_sandbox.py environments/test_deepcoder.py",
    "environments/sandbox_worker.py": "environments/test_sandbox.py "
                                      "environments/test_deepcoder.py"}
MUTANTS = {
    ("train.py", "test_step.py"): [
        ("update(learner, batch.take(rows), config,", "update(learner, batch, config,",
         "dropped groups are trained on"),
        ("scores = scores + starpo.episode_sums(penalty",
         "scores = scores - starpo.episode_sums(penalty", "overlong replies are paid"),
        ('if config.reward_norm_over == "group" else', 'if config.reward_norm_over == "batch" else',
         "BRPO normalises over groups"),
        ('if what != "returns":', 'if what == "entropy":', "the filter by length looks at returns"),
        ("-config.entropy_coef *", "config.entropy_coef *", "entropy is punished"),
        ('losses["kl"] = config.kl_coef *', 'losses["kl"] = -config.kl_coef *',
         "leaving the reference is rewarded"),
        ("return starpo.loss_weights(mask, config.aggregation, config.max_context)",
         "return starpo.loss_weights(mask)", "aggregation is never applied"),
        ("config.clip_low, config.clip_high,", "config.clip_low, config.clip_low,",
         "clip_high is never applied"),
        ("config.dual_clip, part.loss_mask if", "0.0, part.loss_mask if",
         "dual_clip is never applied"),
        ('part.loss_mask if config.ratio == "sequence" else None)', "None)",
         "ratio=sequence is never applied"),
        ("starpo.loss_scale(kept, config.loss_scaling))", "1.0)", "loss_scaling is never applied"),
        ("    if config.soft_reweight:", "    if False:", "soft_reweight is never applied"),
        ("    if config.length_weight:", "    if False:", "length_weight is never applied"),
        ("    if config.zero_task:", "    if False:", "zero_task is never applied"),
        ("token_logprobs(model, part.tokens, part.loss_mask, config.temperature)\n    loss,",
         "token_logprobs(model, part.tokens, part.loss_mask)\n    loss,",
         "the learner's logprobs are at temperature 1"),
        ("part.tokens, part.loss_mask, config.temperature)[0])", "part.tokens, part.loss_mask)[0])",
         "old and reference logprobs are at temperature 1"),
        ("part.response_mask, config.temperature)[1])", "part.response_mask)[1])",
         "the filter's entropy is at temperature 1"),
        ("set_lr(config.critic_lr * decay)", "set_lr(config.critic_lr)",
         "the critic's rate does not decay"),
        ("hash_seed(config.seed, step, epoch)", "hash_seed(config.seed, step)",
         "every epoch has the same shuffle"),
        ("diagnostics.describe(trajectories), **filtered",
         "diagnostics.describe(\n        [t for t in trajectories if kept[t.group_id]] or "
         "trajectories), **filtered", "metrics are described after the filter"),
        ("residual = target - batch.values[batch.value_mask]",
         "residual = batch.values[batch.value_mask]", "explained_variance is of the values"),
        ("starpo.kl_estimate(part.old_logprobs, logprobs)",
         "starpo.kl_estimate(logprobs, part.old_logprobs)", "approx_kl is reversed"),
        ("rewards = rewards - learner.kl_reward_coef * kl",
         "rewards = rewards + learner.kl_reward_coef * kl", "a KL in the reward is paid to tokens"),
        ("len(batch.episode_ids.unique()), config.kl_horizon)", "len(batch), config.kl_horizon)",
         "the KL controller counts rows, not trajectories"),
        ("kept &= kept.cumsum(0) <= config.num_groups", "kept &= kept.cumsum(0) <= len(kept)",
         "resampling trains on more than num_groups groups"),
        ("sum(sums[name] for sums in steps) / len(steps)", "sum(sums[name] for sums in steps) / 1",
         "metrics are summed over optimizer steps"),
        ("part.values, part.returns, config.value_clip)", "part.values, part.returns, 1e9)",
         "value_clip is never applied"),
    ],
    ("starpo.py", "test_step.py"): [
        ("b.response_mask, c.norm_by_std, b.episode_ids", "b.response_mask, True, b.episode_ids",
         "norm_by_std is never applied"),
        ("b.turn_ids, c.gamma, c.lam, c.gamma_turn),", "b.turn_ids, c.gamma, c.lam, 1.0),",
         "gamma_turn is never applied"),
    ],
    ("diagnostics.py", "test_train.py"): [
        ("seed=0, grounding_reward=0,", "seed=0,", "validation has the state reward"),
        ('("_greedy", 0.0)', '("_greedy", config.val_temperature)', "greedy validation samples"),
    ],
    ("train.py", "test_train.py"): [
        ("for warning in diagnostics.warnings_of(log.history):", "for warning in ():",
         "warnings are never printed"),
        ("first = next((line for line in history if",
         "first = next((line for line in history[::-1] if",
         "the regime is compared with the previous measurement"),
        ("        learner.rounds += 1\n", "        learner.rounds = 1\n", "rounds share instances"),
        ("first_seed = (TRAIN_SEED + config.seed", "first_seed = (config.seed",
         "training plays validation's seeds"),
        ("if informative >= config.num_groups:", "if informative > config.num_groups:",
         "resampling plays a round too many"),
    ],
    ("runs.py", "test_train.py"): [
        ('"rounds", "kl_reward_coef", "ema")', '"rounds", "ema")',
         "resume forgets the adapted KL coefficient"),
        ('"rounds", "kl_reward_coef", "ema")', '"rounds", "kl_reward_coef")',
         "resume forgets the moving averages"),
        ('return entry["step"] <= step and not final', 'return entry["step"] <= step',
         "the final test stays in the log when a run goes on"),
        ("if (len(data), zlib.crc32(data)) != expected.get(file):",
         "if len(data) != expected.get(file, (0,))[0]:", "a flipped bit in a checkpoint passes"),
        ('learner.reference.load_state_dict(state["reference"])', "pass",
         "resume takes the trained policy as reference"),
    ],
    ("config.py", "test_config.py test_train.py test_step.py test_eval.py"): [
        ('"entropy_std": ("entropy", "std")', '"entropy_std": ("entropy", "mean")',
         "entropy_std is the mean"),
        ("layers |= ALGOS[algo] | MODELS.get(model, PRETRAINED)", "layers |= ALGOS[algo]",
         "the preset of pretrained models is not applied"),
        ("if not has_effect(config) and value not in", "if False and value not in",
         "options that change nothing are accepted"),
    ],
    ("runs.py", "test_config.py test_train.py test_step.py test_eval.py"): [
        ('FREE_ON_RESUME = ("run", "steps",', 'FREE_ON_RESUME = ("run", "temperature", "steps",',
         "resume may change the temperature"),
        ('for name in ("max_context", "steps"):', 'for name in ("steps",):',
         "resume may shrink the context"),
        ('in ("max_context", "steps"):\n', 'in ("max_context",):\n', "resume may take steps back"),
        ("return dataclasses.replace(read_config(folder), run=run)", "return read_config(folder)",
         "a renamed run is looked for under its old name"),
        ("if folder.exists() and not resume:", "if False:", "a run overwrites another"),
    ],
    ("eval.py", "test_eval.py"): [
        ("low, high = wilson(successes, n)", "low, high = wilson(successes, 2 * n)",
         "the interval is of twice as many episodes"),
        ("show(evaluate(config, args.split, args.size)", 'show(evaluate(config, "val", args.size)',
         "--split is ignored"),
        ("    groups.reset(0)\n    results, rng", "    groups.reset(1)\n    results, rng",
         "baselines play other instances"),
    ],
    ("rollout.py",
     "test_rollout.py test_step.py environments/test_relations.py test_museum.py"): [
        ("add(ids, [0.0] * len(ids), False, -1)", "add(ids, [0.0] * len(ids), True, -1)",
         "observations count as sampled"),
        ("return sum(self.turn_rewards)", "return self.turn_rewards[-1]",
         "the return of an episode is its last reward"),
        ('PER_TURN = {"valid", "effective", "grounding", "worldmodeling"}',
         'PER_TURN = {"effective"}', "`valid` and F1 are summed over turns"),
        ('counters = lengths + (0 if rules.context == "full" else turn * rules.max_context)',
         "counters = lengths", "turns with equal prompts draw equal noise"),
        ("elif len(draft.ids) == draft.cap:", "elif len(draft.ids) > draft.cap:",
         "a reply is a token longer than allowed"),
        ("len(t.tokens) + len(framing) < rules.max_context",
         "len(t.tokens) + len(framing) <= rules.max_context",
         "an observation may fill the context"),
        ("max(0, len(t.turns) - window + 1)", "max(0, len(t.turns) - window)",
         "a window shows a turn too many"),
        ("(rules.max_new_tokens if window > 1 else 1)", "1",
         "a window leaves no room for a whole reply"),
        ("old[:, index.to(old.device), :, :filled]", "old[:, :len(index), :, :filled]",
         "keys stay in their slots when rows leave"),
        ("going[:n].long())", "torch.ones(n, dtype=torch.int64))",
         "a finished row goes on filling its slot"),
        ("<= positions[:, None, :, None])", "<= positions.amax(1)[:, None, None, None])",
         "a query sees the tokens after it"),
        ("log_p = (logits.float() / (rules.temperature or 1.0))", "log_p = (logits.float() / 1.0)",
         "sampling ignores the temperature"),
        ("TopPLogitsWarper(rules.top_p)", "TopPLogitsWarper(1 - rules.top_p)",
         "top-p keeps the mass that it should cut"),
        ("in (run_seed, torch.tensor(seeds), torch.tensor(members)):",
         "in (run_seed, torch.tensor(seeds)):", "members of a group draw equal noise"),
        ("rewards[b, position] = t.turn_rewards[turn]", "rewards[b, position] = t.turn_rewards[-1]",
         "every turn gets the last reward"),
        ("episode_ids=torch.tensor([e for _, _, e in rows])", "episode_ids=torch.arange(len(rows))",
         "every turn counts as an episode in the windowed contexts"),
        ('return paid * bool(info["valid"])', "return paid",
         "descriptions are paid beside invalid actions"),
    ],
    ("starpo.py", "test_starpo.py"): [
        ("held_before < (value - eps) * ranked.abs().sum()",
         "held_before < value * ranked.abs().sum() - eps",
         "the eps of top_p is absolute, so rewards on a small scale are filtered away"),
        ('ranked >= (value * ranked[0] if select == "largest" else ranked[0] / value)',
         "ranked >= value * ranked[0]", "min_p of the smallest keeps nothing but the best"),
        ("index_add(0, group_ids, v * once)", "index_add(0, group_ids, v)",
         "an episode of three rows counts three times in its group"),
        ("(size - 1).clamp(min=1)).sqrt()", "size.clamp(min=1)).sqrt()",
         "the std of a group is that of a population, not of a sample"),
        (".clamp(0, 1) * ends * bool(share)", ".clamp(0, 1) * bool(share)",
         "the overlong penalty is charged on every token of the reply"),
        ("decay = torch.ones_like(rewards).masked_fill(response_mask, gamma)",
         "decay = torch.full_like(rewards, gamma)",
         "observation tokens consume a discount step of REINFORCE"),
        ("(torch.ones_like(r) * gamma * lam).masked_fill(~response_mask, 1.0)",
         "torch.ones_like(r) * gamma * lam", "observation tokens consume a step of GAE"),
        ("discount = torch.full_like(rewards, gamma).masked_fill(ends, 0.0)",
         "discount = torch.full_like(rewards, gamma)", "bi-level GAE counts the later turns twice"),
        ("torch.where(advantages < 0, torch.minimum(loss, floor), loss)",
         "torch.minimum(loss, floor)", "the dual clip also bounds tokens with a good advantage"),
        ("sum(dim=1, keepdim=True) / count", "sum(dim=1, keepdim=True) / log_ratio.shape[1]",
         "the sequence ratio is a mean over the padded row"),
        ("rows = mask.any(dim=1).sum().clamp(min=1)", "rows = torch.tensor(len(mask))",
         "rows without tokens count in the mean over sequences"),
        ("(torch.where(weights > 0, x, 0.0) * weights).sum()", "(x * weights).sum()",
         "nan outside the mask reaches the loss"),
    ],
    ("diagnostics.py", "test_diagnostics.py"): [
        ("reply[:frame.find_tag(reply, TAG) or 0]",
         "reply[:(frame.find_tag(reply, TAG) or -1) + 1]",
         "reasoning contains the tokens that the closing tag touches"),
        ("        trajectory = list(left)[rng.integers(len(left))]",
         "        trajectory = rng.choice([t for t in left for _ in left[t]])",
         "long episodes outweigh short ones in the draw"),
        ("    weights = own.bincount(minlength=scores.shape[1]).double() / len(own)",
         "    weights = torch.full((scores.shape[1],), 1 / scores.shape[1]).double()",
         "every prompt weighs the same in the mutual information"),
        ('    low_mi = (value(now, "mi") < LOW_MI * value(first, "mi")\n              or ',
         '    low_mi = (value(now, "mi") < LOW_MI * value(first, "mi")\n              and ',
         "a collapse needs little information and retrieval at chance"),
        ("range(1, min(REARM + 1, len(steps)))", "range(1, 2)",
         "a warning is given again without a silence of twenty steps"),
    ],
    ("models.py", "test_models.py"): [
        ("    _prove_head(policy)\n    return policy", "    return policy",
         "a model whose logits are not those of the output layer is accepted"),
        ("    return torch.tanh(logits / cap) * cap if cap else logits", "    return logits",
         "the soft cap of the logits is ignored"),
        ("    predicts = hidden_states(model, tokens)[:, :-1][response_mask[:, 1:]]  # (N, D)",
         "    predicts = hidden_states(model, tokens)[response_mask]  # (N, D)",
         "logprobs are read at the token and not before it"),
        ("last_hidden_state[:, :-1]\n        values = self.head(hidden[mask[:, 1:]]",
         "last_hidden_state\n        values = self.head(hidden[mask]",
         "the critic sees the action that it judges"),
    ],
    ("chat.py", "test_models.py"): [
        ('{self._to_user}{self._plain(observation)}"', '{self._to_user}{observation}"',
         "special tokens in the first observation open turns"),
        ("        self._prove()\n", "", "a chat template that changes messages is accepted"),
        ("        self.end_ids = {i for i in (self.end_of_turn, eos) if i is not None}",
         "        self.end_ids = {i for i in (eos,) if i is not None}",
         "only the eos token ends a reply, not the end of turn of the template"),
    ],
    ("bundled.py", "test_bundled.py"): [
        ("min((step + 1) / max(1, steps / 10), (steps - step) / steps))",
         "min((step + 1) / max(1, steps / 10), 1.0))",
         "the learning rate of the warm-up never falls"),
        ('parts["prediction"] = f" {env.describe()}"', 'parts["prediction"] = parts["observation"]',
         "a demonstration predicts the state before its answer"),
    ],
    ("train.py", "test_museum.py"): [
        ("sums.update(backward(learner, mini.take(rows), config))",
         "sums = Counter(backward(learner, mini.take(rows), config))",
         "the logged loss is that of the last micro-batch"),
        ("backward(learner, mini.take(rows), config)",
         "backward(learner, add_loss_weights(mini.take(rows), config), config)",
         "each micro-batch is averaged by itself"),
    ],
    ("envs.py", "test_museum.py"): [
        ("env.reset(seed=self.seeds[row // self.group_size]",
         "env.reset(seed=self.seeds[row // self.group_size] + row % self.group_size",
         "the members of a group play different instances"),
        ('bucket = zlib.crc32(instance.encode(errors="replace")) % 10',
         "bucket = hash(instance) % 10", "the split of an instance depends on the process"),
    ],
    ("envs.py", "test_envs.py"): [
        ("        self._actions += len(outcomes)\n", "        self._actions += len(pieces)\n",
         "bad and surplus pieces use up the actions of the episode"),
        ("np.random.default_rng([seed, member + 1, 1])", "np.random.default_rng([seed, member, 1])",
         "member 0 slips by the numbers that drew its instance at the second attempt"),
        ("            if self.instance_split() == self.split:\n                break",
         "            if self.instance_split() == self.split or attempt > 2:\n              "
         "  break", "after a few draws an instance of another split is taken"),
        ("            self.envs[r] = self._build[r]()\n", "",
         "a step that comes back late changes the next episode"),
    ],
    ("environments/frozenlake.py", "environments/test_frozenlake.py"): [
        ("0 if u >= slip else -1 if u < slip / 2 else 1",
         "0 if u >= slip else -1 if u < slip else 1", "the player slips to one side only"),
    ],
    ("environments/sokoban.py", "environments/test_sokoban.py"): [
        ("reward = len(self.boxes & self.targets) - home + 10",
         "reward = max(0, len(self.boxes & self.targets) - home) + 10",
         "pushing a box off its target costs nothing"),
    ],
    ("environments/sudoku.py", "environments/test_sudoku.py"): [
        ("first = number == self.solution[cell] and cell not in self.paid",
         "first = number == self.solution[cell]", "a cell pays every time that it is changed back"),
        ("for value in others):\n            return 3",
         "for value in others):\n            return 2", "hard puzzles have several solutions"),
        ("solved = self.board == self.solution", "solved = 0 not in self.board",
         "a full grid with a mistake counts as solved"),
    ],
    ("environments/countdown.py", "environments/test_countdown.py"): [
        ("value == self.target == claim", "value == self.target",
         "an equation with a wrong right side counts as solved"),
        ("return operate(evaluate(left), op, evaluate(right))",
         "return operate(evaluate(right), op, evaluate(left))", "8 - 3 is read as 3 - 8"),
    ],
    ("environments/searchqa.py", "environments/test_searchqa.py"): [
        ("return split_of(self.question.about)", "return split_of(self.question.text)",
         "held-out questions are about people of the training split"),
    ],
    ("environments/search.py", "environments/test_searchqa.py"): [
        ("idf = np.log(1 + (self.size", "idf = np.log((self.size",
         "a word that most texts contain lowers their score"),
        ("error.code >= 500", "error.code > 500",
         "a retriever in trouble (status 500) is not asked again"),
    ],
    ("environments/webshop.py", "environments/test_webshop.py"): [
        ('        if words.strip() and self.page == "search":\n', "        if words.strip():\n",
         "a search works on every page"),
        ('partial(go, "item", item=p, chosen={})', 'partial(go, "item", item=p)',
         "options chosen for one item are still chosen on the next"),
        ("        return split_of(self._goal_key())\n",
         "        return split_of(self.instance())\n",
         "the same goal with another price cap may belong to another split"),
    ],
    ("environments/board.py", "environments/test_relations.py"): [
        ("    return VERTICAL[(row > r) - (row < r)], HORIZONTAL[(column > c) - (column < c)]",
         "    return VERTICAL[(row < r) - (row > r)], HORIZONTAL[(column > c) - (column < c)]",
         "above and below are exchanged"),
    ],
    ("environments/deepcoder.py", "environments/test_deepcoder.py"): [
        ("gain = max(0.0, passed / total - self.best)", "gain = passed / total - self.best",
         "a worse try costs, and a better one after it is paid again"),
        (" <= tests // 4 and partial <= tests // 2:", " <= tests // 4:",
         "a part of the formula may pass most of the hidden tests"),
    ],
    ("environments/sandbox_worker.py", "environments/test_sandbox.py"): [
        ("        if made > judged:", "        if True:",
         "an assertion that never calls the submission counts as passed"),
    ],
    ("environments/lean.py", "environments/test_lean.py"): [
        ('            or COMMANDS & set(re.findall(r"\\w+", tactic))):',
         "            or COMMANDS & set(tactic.split())):",
         "a command that touches a sign is let through to Lean"),
        ('    left = [m for m in errors if m.text.startswith("unsolved goals") and m.line in by]',
         '    left = [m for m in errors if m.text.startswith("unsolved goals")]',
         "a half-finished nested proof is accepted, as in RAGEN"),
        ("        if not re.search(SOUND, axioms):", '        if "axioms" not in axioms:',
         "a proof may use any axiom"),
    ],
}


def run_mutant(file, source, tests):
    """Run `tests` on a copy in which minragen/`file` holds `source`.

    returns: (outcome, seconds), outcome one of "killed", "survived", "killed (time)"
    raises: RuntimeError for a test file that is not there
    """
    missing = [t for t in tests if not (ROOT / "tests" / t).exists()]
    if missing:
        raise RuntimeError(f"{file}: tests/{missing[0]} is not there.")
    folder, began = Path(tempfile.mkdtemp(prefix="mutant-")), time.monotonic()
    try:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name,
                                ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "minragen" / file).write_text(source)
        pid = os.fork()
        if pid == 0:
            _run_tests(folder, tests)
        code = _wait(pid, began + TIME_LIMIT)
        # Above 1 not even the collection came to its end.
        outcome = {0: "survived", None: "killed (time)"}.get(code, "killed")
        return outcome, time.monotonic() - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_tests(folder, tests):
    """In the forked process: pytest on the copy, then exit with its code."""
    code = 3
    try:
        os.setsid()
        # A mutant must not leave wrong weights where real runs look for them.
        os.environ["MINRAGEN_CACHE"] = str(folder / "cache")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        import pytest

        with contextlib.suppress(SystemExit):
            code = int(pytest.main(["-x", "-q", "--no-header", "--assert=plain",
                                    "-p", "no:cacheprovider", "--rootdir", str(folder),
                                    *(f"tests/{t}" for t in tests)]))
    finally:
        os._exit(code)


def _wait(pid, deadline):
    """The exit code of a child, or None if it had to be killed at the deadline."""
    code = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # with whatever the tests have left running
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return 1 if code is not None and code < 0 else code  # a crash is noticed, too


def generic_mutants(file):
    """All mutants that cosmic-ray makes of a file: [(line, operator, source), ...].

    The sources are functions without arguments: thousands of mutants, of which few are looked at.
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / "minragen" / file).read_text()
    nodes, found = list(ast_nodes(get_ast(source))), []
    for name in operator_names():
        if "Variable" in name:  # these two need arguments
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for (line, _), _ in operator.mutation_positions(node):
                found.append((line, name.partition("/")[2], lambda operator=operator,
                              n=occurrence: mutate_code(source, operator, n)))
                occurrence += 1
    return found


def table(only=""):
    """The rows above as jobs: [(file, tests, what is wrong, source), ...].

    raises: ValueError for a row whose text does not stand exactly once in its file
    """
    jobs = []
    for (file, tests), rows in MUTANTS.items():
        source = (ROOT / "minragen" / file).read_text()
        for text, wrong, what in rows if only in file else ():
            if source.count(text) != 1:
                raise ValueError(f"{file} has {source.count(text)} times, expected once: {text!r}")
            jobs.append((file, tests, what, source.replace(text, wrong)))
    return jobs


def sample(seed):
    """SAMPLE of all the mutants that cosmic-ray makes of the package, as jobs of the same kind."""
    found = [(file, *mutant) for file in TESTS for mutant in generic_mutants(file)]
    jobs = []
    for file, line, operator, make in random.Random(seed).sample(found, SAMPLE):
        before, source = (ROOT / "minragen" / file).read_text().splitlines(), make()
        changed = next(b for a, b in zip(before, source.splitlines()) if a != b).strip()
        jobs.append((file, TESTS[file],
                     f"line {line}, {operator}: {before[line - 1].strip()} -> {changed}", source))
    return jobs


def run(jobs, processes):
    """Try all jobs, `processes` at a time. Prints and returns {what is wrong: outcome}."""
    def attempt(job):
        file, tests, what, source = job
        outcome, seconds = run_mutant(file, source, tests.split())
        print(f"{outcome:13} {seconds:6.1f} s  {file}: {what}", flush=True)
        return f"{file}: {what}", outcome

    with ThreadPoolExecutor(processes) as pool:
        return dict(pool.map(attempt, jobs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only files whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="mutants at a time [cores]")
    args = parser.parse_args()
    # The copies bring their own modules; what they all import is imported once, here.
    sys.path[:] = [p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))]
    for name in PRELOADED:
        importlib.import_module(name)
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()

    if git("status", "--porcelain", "minragen", "tests"):
        sys.exit("error: minragen/ or tests/ differ from the commit whose hash is the seed.")
    commit = git("rev-parse", "HEAD")
    unchanged, generic_jobs = (ROOT / "minragen" / "__init__.py").read_text(), sample(commit)
    tests = sorted({name for names in TESTS.values() for name in names.split()})
    if run_mutant("__init__.py", unchanged, tests)[0] != "survived":
        sys.exit("error: the tests fail on the unchanged project, so every mutant would die.")
    rows = run(table(args.only), args.jobs)
    drawn = run([job for job in generic_jobs if args.only in job[0]], args.jobs)
    survivors = [what for what, outcome in rows.items() if outcome == "survived"]
    generic = [what for what, outcome in drawn.items() if outcome == "survived"]
    share = 1 - len(generic) / max(1, len(drawn))
    print(f"table: {len(rows)} mutants, survivors: {survivors or 'none'}\n"
          f"sample of commit {commit[:12]}: {len(drawn)} mutants, {share:.1%} killed")
    if not args.only:
        result = {"commit": commit, "mutants": len(rows), "survivors": survivors,
                  "generic": len(drawn), "generic_killed": len(drawn) - len(generic),
                  "generic_timeouts": sum(o == "killed (time)" for o in drawn.values()),
                  "generic_survivors": generic}
        (ROOT / "runs" / "readme-mutants.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(survivors) or (not args.only and share < LEAST_SHARE))


if __name__ == "__main__":
    main()
