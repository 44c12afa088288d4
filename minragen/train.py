"""The whole algorithm as an outline: roll out, filter, compare, update; validate, save, go on.

    python -m minragen.train --env frozenlake            (or: make train ENV=frozenlake)
    python -m minragen.train --run my-run --resume       (go on where a run was stopped)

Reading order: `Config` and the presets, `train` (the loop), `update` (one StarPO update),
`validate`, then what keeps a run on disk. One console line a step; the same names in
runs/NAME/metrics.jsonl.

Deltas (from RAGEN V2's trainer):
  1. Every optimizer step is normalised over its own tokens, whatever the micro-batch size.
  2. Mini-batches are random draws, not neighbours in length, and are never filled up with
     duplicates.
  3. In float32 old_logprobs are the sampler's own: sampler and learner are one set of weights and
     one function, and `logprob_gap` measures every step that they agree. In bfloat16 the kernels of
     a cached and of a full pass round differently, so old_logprobs are computed again before the
     update.
  4. The reference model exists only while `kl_coef` is above 0, and the critic only for `gae`.
"""

import argparse
import ast
import copy
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from minragen import starpo
from minragen.envs import SPLITS, EnvGroups, nearest, parse_mixture
from minragen.models import (
    RESPONSE_FORMATS,
    AdamW,
    ChatFrame,
    Critic,
    choose,
    kv_shape,
    load_policy,
    token_logprobs,
)
from minragen.rollout import Sampling, StopReason, collect, first_prompt, make_batch
from minragen.warmup import default_steps, warm_start

RUNS = Path("runs")
EMPTY_STEPS = 5  # consecutive updates without a single informative group after which a run stops
# Instance seeds of run seed s begin at TRAIN_SEED + s * TRAIN_SEED_STRIDE; validation's at 0.
TRAIN_SEED, TRAIN_SEED_STRIDE = 2**41, 2**24


# ==================================================================================================
# What can be set


def opt(default, text, choices=None, least=0, most=2**31):
    """A field with its help, the values it may have, or the bounds of a number."""
    return field(default=default, metadata=dict(help=text, choices=choices, least=least, most=most))


@dataclass(frozen=True)
class Config:
    """Every field is an option: `max_new_tokens` is `--max-new-tokens`. 0 or -1 marks 'derived'."""

    env: str = opt("frozenlake", "environment, mixture (a,b or a=12,b=4), package.module:Class or "
                                 "Gymnasium id")
    run: str = opt("", "name of the folder under runs/; empty: derived from env, algo, model and "
                       "seed")
    seed: int = opt(0, "everything random in the run follows from it", most=2**20 - 1)
    algo: str = opt("grpo", "preset of the algorithm: which estimator and what goes with it",
                    ("grpo", "ppo"))
    model: str = opt("", "tiny, smollm2, a folder or a Hugging Face id; empty: by the machine")
    device: str = opt("", "cpu, cuda, ...; empty: cuda if there is one")
    threads: int = opt(0, "CPU threads of PyTorch; 0: one for tiny, else all", most=1024)
    steps: int = opt(100, "updates of the policy", least=1)
    warmup_steps: int = opt(-1, "supervised steps on weak play before RL; -1: by the model, "
                                "0: none", least=-1)
    # -- environment
    env_arg: tuple = opt((), "option of the environment, name=value or env.name=value; may be "
                             "repeated")
    max_turns: int = opt(0, "replies per episode; 0: the environment's own")
    max_actions_per_turn: int = opt(0, "actions executed from one reply; 0: the environment's own")
    max_actions: int = opt(0, "actions per episode; 0: the environment's own")
    response_format: str = opt("free_think", "what a reply looks like", RESPONSE_FORMATS)
    # -- rollout
    num_groups: int = opt(16, "P: prompts (instances) per step", least=1, most=2**16)
    group_size: int = opt(16, "G: trajectories per prompt", least=1, most=2**16)
    temperature: float = opt(1.0, "of sampling while training; >0", least=1e-4)
    top_k: int = opt(0, "sample among the k most probable tokens; 0: all")
    top_p: float = opt(1.0, "sample among the most probable tokens that hold this mass")
    max_new_tokens: int = opt(24, "tokens per reply", least=1, most=2**16)
    max_context: int = opt(512, "tokens per conversation", least=2, most=2**24)
    max_rows: int = opt(256, "conversations in one batch of generation", least=1)
    # -- learning
    lr: float = opt(3e-4, "learning rate of the policy")
    lr_final: float = opt(1.0, "share of the learning rates left at the last step, linearly "
                               "reached")
    critic_lr: float = opt(1e-3, "learning rate of the critic (gae only)")
    advantages: str = opt("grpo", "estimator of the advantages", ("grpo", "gae"))
    norm_by_std: bool = opt(True, "grpo: divide by the group's standard deviation")
    gamma: float = opt(1.0, "gae: discount per sampled token", most=1)
    lam: float = opt(1.0, "gae: lambda per sampled token", most=1)
    clip_low: float = opt(0.2, "ratio is clipped to [1 - low, 1 + high]")
    clip_high: float = opt(0.28, "ratio is clipped to [1 - low, 1 + high]")
    dual_clip: float = opt(3.0, "bound on the loss of bad tokens; >1")
    value_clip: float = opt(0.5, "largest trusted move of a value in one update")
    entropy_coef: float = opt(0.001, "weight of the entropy bonus")
    kl_coef: float = opt(0.0, "weight of the KL to the model before RL; 0: no reference model is "
                              "loaded")
    kl_estimator: str = opt("k3", "how the KL is estimated, k2 or k3")
    filter_top_p: float = opt(0.9, "keep the groups that hold this share of the reward spread; "
                                   "1: all groups")
    epochs: int = opt(1, "passes over a batch", least=1)
    mini_batch: int = opt(64, "trajectories per optimizer step", least=1)
    token_budget: int = opt(2400, "padded tokens per forward pass of the learner; changes speed "
                                  "and memory only", least=1)
    max_grad_norm: float = opt(1.0, "gradients are clipped to this global norm", least=1e-4)
    # -- measuring
    val_size: int = opt(256, "held-out instances per validation", least=1, most=2**16)
    val_temperature: float = opt(0.5, "of sampled validation; greedy is always measured too")
    val_every: int = opt(20, "steps between validations; also before the first and after the last",
                         least=1)
    save_every: int = opt(20, "steps between checkpoints; also after the last", least=1)


# An environment's preset is complete: `--env NAME` alone is enough. Values are for the model in the
# box.
PRESETS = {
    "bandit": dict(steps=30, lr=3e-4, max_new_tokens=24, max_context=256),
    "frozenlake": dict(steps=70, lr=5e-4, lr_final=0.1, max_new_tokens=24, max_context=512),
    "sokoban": dict(steps=50, lr=5e-4, lr_final=0.1, max_new_tokens=24, max_context=640,
                    val_every=25),
    "sudoku": dict(steps=40, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                   max_new_tokens=24, max_context=768),
    "countdown": dict(steps=160, lr=5e-4, lr_final=0.1, max_new_tokens=32, max_context=128,
                      val_every=40),
    "webshop": dict(steps=40, warmup_steps=600, lr=2e-4, lr_final=0.2, group_size=8,
                    max_new_tokens=32, max_context=1152),
    "searchqa": dict(steps=50, warmup_steps=600, lr=5e-4, lr_final=0.1, max_new_tokens=24,
                     max_context=512, val_every=25),
    "lean": dict(steps=20, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                 max_new_tokens=72, max_context=1024),
    "deepcoder": dict(steps=40, warmup_steps=200, lr=5e-4, lr_final=0.1, num_groups=8,
                      max_new_tokens=48, max_context=256),
    "metamathqa": dict(steps=40, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                       max_new_tokens=64, max_context=768),
}
ALGOS = {
    "grpo": dict(advantages="grpo"),
    "ppo": dict(advantages="gae", lam=0.95, lr=3e-4),
}
# What changes for a pretrained model: RAGEN V2's rates, shorter batches, room for longer replies.
PRETRAINED = dict(warmup_steps=-1, lr=1e-6, critic_lr=1e-5, num_groups=8, mini_batch=32,
                  max_new_tokens=128, max_context=2048, token_budget=8192)


def preset(env="frozenlake", algo="grpo", model="tiny"):
    """The complete Config of an environment, an algorithm and a model, before any option of the
    user's."""
    layers = {}
    for name in (part.partition("=")[0].strip() for part in env.split(",")):
        # A mixture takes the larger of each number.
        for key, value in PRESETS.get(name, {}).items():
            layers[key] = max(value, layers.get(key, value))
    if algo not in ALGOS:
        raise ValueError(nearest("algo", algo, list(ALGOS)))
    layers.update(ALGOS[algo])
    if model != "tiny":
        layers.update(PRETRAINED)
    return Config(env=env, algo=algo, model=model, **layers)


def parse(argv):
    """Command line -> (Config, resume, the options that differ from the preset, why this model).

    raises: ValueError with the nearest known name for an unknown option, environment, algorithm or
        model
    """
    parser = argparse.ArgumentParser(
        prog="minragen.train", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Train a language-model agent. Defaults depend on --env.")
    parser.error = _usage_error
    parser.add_argument("--resume", action="store_true", default=False,
                        help="go on from runs/NAME/checkpoint")
    fields = dataclasses.fields(Config)
    for f in fields:
        kind = (dict(action="append") if f.type is tuple else
                dict(type=_boolean if f.type is bool else f.type))
        parser.add_argument("--" + f.name.replace("_", "-"),
                            help=f"{f.metadata['help']} [{f.default}]", **kind)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ["--" + f.name.replace("_", "-") for f in fields] + ["--resume"]
        raise ValueError(nearest("option", unknown[0].partition("=")[0], known))
    given = vars(given)
    if "env_arg" in given:
        given["env_arg"] = tuple(given["env_arg"])
    if given.pop("resume"):
        config = resumed_config(given)
        base = preset(config.env, config.algo, config.model)
        return config, True, differences(config, base), f"model {config.model} as the run began"
    model, _, why = choose(given.get("model", ""), given.get("device", ""))
    base = preset(given.get("env", Config.env), given.get("algo", Config.algo), model)
    config = dataclasses.replace(base, **{**given, "model": model})
    check(config)
    return config, False, differences(config, base), why


def differences(config, base):
    """{field: value} where two Configs differ, but for what only names a run."""
    return {k: v for k, v in vars(config).items()
            if v != getattr(base, k) and k not in ("run", "seed", "device")}


def _usage_error(message):
    raise ValueError(message[0].lower() + message[1:] + ". See --help.")


def _boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text.lower() == "true"


def check(config):
    """Refuse what cannot work, before anything is built. Raises ValueError with one sentence."""
    for f in dataclasses.fields(config):
        check_field(f, getattr(config, f.name))
    if config.steps * config.num_groups > TRAIN_SEED_STRIDE:
        raise ValueError(f"steps * num_groups: got {config.steps * config.num_groups}, expected at "
                         f"most {TRAIN_SEED_STRIDE}, the instances that a seed has.")
    if config.run and not re.fullmatch(r"[\w+=-][\w.+=-]{0,99}", config.run):
        raise ValueError(f"bad run name {config.run!r}: expected up to 100 letters, digits and "
                         f"-_.+= only.")
    if config.advantages == "grpo" and config.group_size < 2:
        raise ValueError("grpo compares the members of a group: got group_size 1, expected at "
                         "least 2.")
    Sampling(config.temperature, config.top_k, config.top_p)
    nothing = torch.zeros(1)  # the functions themselves say what they refuse
    starpo.kl_estimate(nothing, nothing, config.kl_estimator)
    starpo.policy_loss(nothing, nothing, nothing, dual_clip=config.dual_clip)
    starpo.filter_groups(nothing, config.filter_top_p)
    for split, groups in (("train", config.num_groups), ("val", config.val_size)):
        build_groups(config, split, groups, 1)


def check_field(f, value):
    """Refuse a value outside the choices or the bounds of its field."""
    choices, least, most = (f.metadata[key] for key in ("choices", "least", "most"))
    if choices and value not in choices:
        raise ValueError(nearest(f.name, str(value), list(choices)))
    if f.type in (int, float) and not math.isfinite(value):
        raise ValueError(f"{f.name}: got {value}, expected a finite number.")
    if f.type in (int, float) and value < least:
        raise ValueError(f"{f.name}: got {value}, expected at least {least}.")
    if f.type in (int, float) and value > most:
        raise ValueError(f"{f.name}: got {value}, expected at most {most}.")


def env_options(config):
    """`--env-arg size=8 --env-arg frozenlake.slip=0.2` -> {"size": 8, "frozenlake.slip": 0.2}."""
    options = {}
    for text in config.env_arg:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"bad env_arg {text!r}: expected name=value.")
        try:
            options[name] = ast.literal_eval(
                value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            options[name] = value  # a text
    return options


def budgets(config):
    names = ("max_turns", "max_actions_per_turn", "max_actions")
    return {n: getattr(config, n) for n in names if getattr(config, n)}


def build_groups(config, split, num_groups, group_size):
    """The run's environments as groups: in the mixture's shares for training, evenly for everything
    else."""
    as_given = split == "train" and num_groups == config.num_groups
    spec = config.env if as_given else ",".join(env_names(config))
    return EnvGroups(spec, num_groups, group_size, split, env_options(config), budgets(config))


def backends(config):
    """For the first line: what outside of this process the environments lean on."""
    groups = build_groups(config, "train", len(env_names(config)), 1)
    return "".join(f"; {name} relies on {env.backend}"
                   for name, env in zip(groups.names, groups.envs) if env.backend)


# ==================================================================================================
# The loop


@dataclass
class Learner:
    """Everything that training changes, and the reference that it must not."""

    policy: object
    frame: ChatFrame
    optimizer: AdamW
    critic: Critic | None = None
    critic_optimizer: AdamW | None = None
    reference: torch.nn.Module | None = None
    step: int = 0  # finished steps
    empty_steps: int = 0  # consecutive steps whose filter kept nothing


def train(config, resume=False, say=print):
    """Run `config.steps` steps of StarPO in runs/NAME. Returns the metrics of the last line.

    raises: ValueError for a run name that is taken, a damaged checkpoint, a prompt that fills the
        context
    """
    folder = run_folder(config, resume)
    learner = build(config, folder if resume else None, say)
    if not resume:
        make_folder(folder)
    write_whole(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    start = time.time()
    log = Log(folder, learner.step)
    say(f"run       {folder}: metrics.jsonl, trajectories.jsonl, checkpoint/")
    groups = build_groups(config, "train", config.num_groups, config.group_size)
    if learner.step == 0:
        log.write({"step": 0, **validate(learner, config, "val", log)}, config)
    while learner.step < config.steps and learner.empty_steps < EMPTY_STEPS:
        step, began = learner.step + 1, time.time()
        bar = Bar(f"step {step}")
        trajectories = roll_out(learner, config, groups, bar)
        rolled = time.time()
        metrics = {"step": step, **describe(trajectories)}
        batch = make_batch(trajectories)
        spread = starpo.group_spread(batch.episode_returns, batch.group_ids)
        kept = starpo.filter_groups(spread, config.filter_top_p)
        metrics |= {"reward_std": float(spread.mean()), "groups_kept": int(kept.sum())}
        learner.empty_steps = 0 if kept.any() else learner.empty_steps + 1
        if kept.any():
            rows = kept[batch.group_ids].nonzero()[:, 0]
            metrics |= update(learner, batch.take(rows).to(learner.policy.device), config, step,
                              bar)
        bar.close()
        learner.step = step
        metrics |= {"seconds": time.time() - began, "rollout_seconds": rolled - began,
                    "tokens_per_second":
                        metrics["response_tokens"] * len(trajectories) / (rolled - began)}
        last = step == config.steps or learner.empty_steps >= EMPTY_STEPS
        if step % config.val_every == 0 or last:
            metrics |= validate(learner, config, "val", log)
        log.write(metrics, config)
        if step % config.save_every == 0 or last:
            save_checkpoint(folder, learner)
    if learner.empty_steps >= EMPTY_STEPS:
        say(f"stopped: in {EMPTY_STEPS} steps in a row no group had any spread of reward, so there "
            f"is nothing to learn from. Is the task solved, or never solved? Read "
            f"{folder}/trajectories.jsonl.")
    final = {"step": learner.step, **validate(learner, config, "test", log),
             "elapsed": time.time() - start}
    log.write(final, config)
    say(f"done      {folder}; measure it again with: make eval RUN={folder.name}")
    return final


def build(config, checkpoint_of, say):
    """Policy, frame, critic, reference and optimizers; from a checkpoint if there is one."""
    on_one_core = config.model == "tiny" and choose(config.model, config.device)[1].type == "cpu"
    torch.set_num_threads(config.threads or (1 if on_one_core else os.cpu_count()))
    checkpoint = checkpoint_of and find_checkpoint(checkpoint_of)
    policy = build_policy(config, checkpoint)
    frame = ChatFrame(policy.tokenizer, config.response_format)
    check_context(frame, config)
    if not checkpoint:
        warm_start(policy, frame, ",".join(env_names(config)), warmup_steps(config),
                   env_options(config), budgets(config), say)
    learner = Learner(policy, frame, AdamW(policy.model.parameters(), config.lr))
    if config.advantages == "gae":
        learner.critic = Critic(policy)
        learner.critic_optimizer = AdamW(learner.critic.parameters(), config.critic_lr)
    if config.kl_coef > 0:
        learner.reference = copy.deepcopy(policy.model).requires_grad_(False)
    if checkpoint:
        load_trainer_state(checkpoint, learner)
        say(f"resumed   after step {learner.step}")
    say(forecast(learner, config))
    return learner


def warmup_steps(config):
    return default_steps(config.model) if config.warmup_steps < 0 else config.warmup_steps


def build_policy(config, checkpoint=None):
    """The policy of a run: fresh (tiny is built for the words of its environments) or from a
    checkpoint folder."""
    _, device, _ = choose(config.model, config.device)
    if checkpoint:
        return dataclasses.replace(load_policy(str(checkpoint), device, stored_dtype=True),
                                   name=config.model)
    samples = [env for split in SPLITS
               for env in build_groups(config, split, len(env_names(config)), 1).envs]
    return load_policy(config.model, device, samples)


def check_context(frame, config):
    """Refuse a context that a first prompt already fills, before a run folder is made for it."""
    for split in SPLITS:
        groups = build_groups(config, split, config.val_size, 1)
        observations = groups.reset(TRAIN_SEED if split == "train" else 0)
        for env, name, observation in zip(groups.envs, groups.names, observations):
            first_prompt(frame, env, name, observation, config.max_context)


def env_names(config):
    """The environments of the mixture, each once."""
    return list(dict.fromkeys(name for name, _ in parse_mixture(config.env, config.num_groups)))


def roll_out(learner, config, groups, bar):
    """One batch of fresh instances: step t of run seed s plays seeds that no other step or run
    plays."""
    first_seed = TRAIN_SEED + config.seed * TRAIN_SEED_STRIDE + learner.step * config.num_groups
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    return collect(learner.policy, learner.frame, groups, first_seed, sampling, config.seed,
                   config.max_new_tokens, config.max_context, config.max_rows, bar.sampled)


def describe(trajectories):
    """What happened in the episodes, before any filter. Mixtures also get every metric per
    environment."""
    def means(chosen, prefix=""):
        n = len(chosen)
        stats = {"success": sum(t.success for t in chosen) / n,
                 "episode_return": sum(t.episode_return for t in chosen) / n,
                 "turns": sum(len(t.turns) for t in chosen) / n,
                 "response_tokens": sum(sum(t.response_mask) for t in chosen) / n,
                 "context": sum(t.stop is StopReason.CONTEXT for t in chosen) / n,
                 "env_errors": sum(t.stop is StopReason.ENV_ERROR for t in chosen)}
        for name in sorted(set().union(*(t.metrics for t in chosen)) - {"success"}):
            stats[name] = sum(t.metrics.get(name, 0.0) for t in chosen) / n
        return {prefix + name: value for name, value in stats.items()}

    metrics, names = means(trajectories), sorted({t.env for t in trajectories})
    for name in names if len(names) > 1 else ():
        metrics |= means([t for t in trajectories if t.env == name], f"{name}/")
    return metrics


# ==================================================================================================
# One update


def update(learner, batch, config, step, bar=None):
    """Advantages, then one optimizer step per mini-batch of trajectories. Returns metrics.

    Token means are over the mini-batch; micro-batches only bound memory and keep the caches warm.
    """
    scale = 1 - (1 - config.lr_final) * (step - 1) / max(1, config.steps - 1)
    learner.optimizer.set_lr(config.lr * scale)
    if learner.critic:
        learner.critic_optimizer.set_lr(config.critic_lr * scale)
    prepare(learner, batch, config)
    sums, norms = {}, []
    for epoch in range(config.epochs):
        shuffle = torch.Generator().manual_seed(hash_seed(config.seed, step, epoch))
        order = torch.randperm(len(batch), generator=shuffle).to(batch.tokens.device)
        for index in order.split(config.mini_batch):
            mini = batch.take(index)
            total = int(mini.loss_mask.sum())
            for rows in micro_batches(mini.lengths, config.token_budget):
                shares = backward(learner, mini.take(rows), config, total, first=not norms)
                for name, value in shares.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                if bar:
                    bar.trained(len(rows))
            norms.append([float(learner.optimizer.step(config.max_grad_norm))])
            if learner.critic:
                norms[-1].append(float(learner.critic_optimizer.step(config.max_grad_norm)))
    # Of the first mini-batch only: later ones have been moved by their updates.
    gap = sums.pop("logprob_gap")
    metrics = {name: value / len(norms) for name, value in sums.items()} | {"logprob_gap": gap}
    metrics["grad_norm"] = sum(n[0] for n in norms) / len(norms)
    metrics["updates_skipped"] = sum(not math.isfinite(n[0]) for n in norms)
    if metrics["updates_skipped"] == len(norms):
        raise RuntimeError(f"no gradient of step {step} was finite: the policy has diverged. Is "
                           f"the learning rate too large? See the last lines of metrics.jsonl.")
    if learner.critic:
        metrics["critic_grad_norm"] = sum(n[1] for n in norms) / len(norms)
        residual, target = ((batch.returns - batch.values)[batch.loss_mask],
                            batch.returns[batch.loss_mask])
        metrics["explained_variance"] = 1 - float(residual.var() / (target.var() + 1e-8))
    return metrics


@torch.no_grad()
def prepare(learner, batch, config):
    """Fill in what the losses compare with: old and reference logprobs, values, advantages,
    returns."""
    batch.old_logprobs = batch.sample_logprobs
    if next(learner.policy.model.parameters()).dtype != torch.float32:
        batch.old_logprobs = _in_micro_batches(batch, config, lambda part: token_logprobs(
            learner.policy.model, part.tokens, part.response_mask, config.temperature)[0])
    if learner.reference is not None:
        batch.ref_logprobs = _in_micro_batches(batch, config, lambda part: token_logprobs(
            learner.reference, part.tokens, part.response_mask, config.temperature)[0])
    if config.advantages == "grpo":
        batch.advantages = starpo.group_advantages(batch.episode_returns, batch.group_ids,
                                                   batch.response_mask, config.norm_by_std)
        return
    batch.values = _in_micro_batches(
        batch, config, lambda part: learner.critic(part.tokens, part.response_mask))
    advantages, batch.returns = starpo.masked_gae(batch.rewards, batch.values, batch.response_mask,
                                                  config.gamma, config.lam)
    batch.advantages = starpo.whiten(advantages, batch.response_mask)


def _in_micro_batches(batch, config, function):
    """function(part) -> (b, t) for every micro-batch, put together to (B, T)."""
    result = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    for rows in micro_batches(batch.lengths, config.token_budget):
        part = function(batch.take(rows))
        result[rows, :part.shape[1]] = part
    return result


def backward(learner, part, config, total, first=False):
    """Backpropagate one micro-batch. `total`: loss tokens of the whole mini-batch.

    returns: {metric: this micro-batch's share of the mini-batch's token mean}
    """
    logprobs, entropy = token_logprobs(learner.policy.model, part.tokens, part.response_mask,
                                       config.temperature)
    mask = part.loss_mask
    loss, clipped = starpo.policy_loss(logprobs, part.old_logprobs, part.advantages,
                                       config.clip_low, config.clip_high, config.dual_clip)
    shares = {"policy_loss": starpo.aggregate(loss, mask, total),
              "entropy": starpo.aggregate(entropy, mask, total)}
    objective = shares["policy_loss"] - config.entropy_coef * shares["entropy"]
    if part.ref_logprobs is not None:
        shares["kl_ref"] = starpo.aggregate(
            starpo.kl_estimate(logprobs, part.ref_logprobs, config.kl_estimator), mask, total)
        objective = objective + config.kl_coef * shares["kl_ref"]
    objective.backward()
    if learner.critic:
        values = learner.critic(part.tokens, part.response_mask)
        shares["value_loss"] = starpo.aggregate(
            starpo.value_loss(values, part.values, part.returns, config.value_clip), mask, total)
        shares["value_loss"].backward()
    with torch.no_grad():
        shares["clip_fraction"] = starpo.aggregate(clipped.float(), mask, total)
        shares["approx_kl"] = starpo.aggregate(
            starpo.kl_estimate(part.old_logprobs, logprobs), mask, total)
        if first:
            shares["logprob_gap"] = starpo.aggregate(
                (logprobs - part.sample_logprobs).abs(), mask, total)
    return {name: value.detach() for name, value in shares.items()}


def micro_batches(lengths, token_budget):
    """Row indices, sorted by length and cut so that rows * longest <= token_budget; at least one
    row each."""
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, token_budget // int(lengths[order[start]]))
        yield order[start:start + rows]
        start += rows


def hash_seed(*parts):
    return zlib.crc32(repr(parts).encode())


# ==================================================================================================
# Measuring


def validate(learner, config, split, log=None):
    """Success on `val_size` fixed instances of a split that training never plays, sampled and
    greedy.

    returns: {"val/success", "val/success_greedy", "val/episode_return", "val/valid", ...}; in a
        mixture also "val/ENV/success" and "val/ENV/success_greedy"
    """
    groups, metrics = build_groups(config, split, config.val_size, 1), {}
    for suffix, played in play_held_out(learner.policy, learner.frame, groups, config).items():
        stats = describe(played)
        wanted = [n for n in stats
                  if n.rpartition("/")[2] in ("success", "episode_return", "valid")]
        metrics |= {f"{split}/{name}{suffix}": stats[name] for name in wanted}
        if log and not suffix:
            log.trajectories(learner.step, split, played[:4])
    return metrics


def play_held_out(policy, frame, groups, config):
    """{"": trajectories sampled at val_temperature, "_greedy": greedy ones}, the same noise every
    time."""
    bar = Bar(f"validation on {groups.split}")
    played = {suffix: collect(policy, frame, groups, 0, Sampling(temperature), 0,
                              config.max_new_tokens, config.max_context, config.max_rows,
                              bar.sampled)
              for suffix, temperature in (("", config.val_temperature), ("_greedy", 0.0))}
    bar.close()
    return played


def forecast(learner, config):
    """One line: where the memory will go, from the sizes of things; activations are a rule of
    thumb."""
    model = learner.policy.model
    c, n = model.config.get_text_config(), learner.policy.num_parameters
    width = next(model.parameters()).element_size()
    trained = 1 + (learner.critic is not None)
    weights = n * width * (trained + (learner.reference is not None))
    # Adam's moments, gradients, masters.
    state = n * (8 + width + (4 if width < 4 else 0)) * trained
    layers, heads, head_dim = kv_shape(model)
    rows = min(config.max_rows, config.num_groups * config.group_size)
    cache = 2 * layers * rows * config.max_context * heads * head_dim * width
    per_token = c.num_hidden_layers * (16 * c.hidden_size + 4 * c.intermediate_size) * width
    activations = trained * per_token * config.token_budget
    gib = {"weights": weights, "optimizer": state, "KV slots (at most)": cache,
           "activations": activations}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in gib.items())
    return f"memory    about {sum(gib.values()) / 2**30:.2f} GiB: {parts}"


class Bar:
    """The progress inside a step: tokens sampled, then trajectories trained on. Gone when the step
    is done."""

    def __init__(self, title):
        self.title, self.unit = title, "tokens sampled"
        self.bar = tqdm(desc=title, unit="", leave=False, disable=None)

    def sampled(self, tokens):
        self._advance(tokens, "tokens sampled")

    def trained(self, trajectories):
        self._advance(trajectories, "trajectories trained on")

    def _advance(self, amount, unit):
        if unit != self.unit:
            self.unit = unit
            self.bar.reset()
        self.bar.set_postfix_str(unit, refresh=False)
        self.bar.update(amount)

    def close(self):
        self.bar.close()


class Log:
    """metrics.jsonl, trajectories.jsonl and the console line, all with the same names."""

    def __init__(self, folder, step):
        self.folder = folder
        # A resumed run forgets what came after its checkpoint.
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            path = folder / name
            lines = path.read_text().splitlines() if path.exists() else []
            write_whole(path, "".join(line + "\n" for line in lines if _before(step, line)))

    def write(self, metrics, config):
        """One line to metrics.jsonl and one to the console."""
        # JSON has no nan and no infinity.
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        rounded = {k: round(v, 6) if isinstance(v, float) and abs(v) > 1e-3 else v
                   for k, v in metrics.items()}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")
        tqdm.write(console_line(metrics, config))
        sys.stdout.flush()

    def trajectories(self, step, split, played):
        """The conversations as chat messages, one JSON object a line."""
        with open(self.folder / "trajectories.jsonl", "a") as file:
            for t in played:
                file.write(json.dumps({"step": step, "split": split, "env": t.env, "seed": t.seed,
                                       "success": t.success, "stop": t.stop.value,
                                       "turn_rewards": t.turn_rewards,
                                       "messages": t.messages()}) + "\n")


def _before(step, line):
    """Whether a line belongs to the run up to its checkpoint at `step`; its final test does not."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:  # the last line of a killed run may be cut off
        return False
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    final = entry.get("split") == "test" or any(name.startswith("test/") for name in entry)
    return entry["step"] <= step and not final


def console_line(metrics, config):
    """One aligned line; the parts that this step did not produce are left out."""
    def part(name, label, form):
        return f"{label} {metrics[name]:{form}}" if name in metrics else ""

    val = [f"{split} {metrics[f'{split}/success']:.3f} "
           f"greedy {metrics[f'{split}/success_greedy']:.3f}"
           for split in ("val", "test") if f"{split}/success" in metrics]
    kept = (f"kept {metrics['groups_kept']:2d}/{config.num_groups}" if "groups_kept" in metrics
            else "")
    parts = [f"step {metrics['step']:4d}/{config.steps}", part("success", "success", ".3f"),
             part("episode_return", "return", "6.3f"), part("valid", "valid", ".2f"), kept,
             part("entropy", "entropy", ".3f"), part("kl_ref", "kl_ref", ".4f"),
             part("grad_norm", "grad", "6.3f"), part("logprob_gap", "gap", ".0e"),
             part("tokens_per_second", "tok/s", "6.0f"), part("seconds", "sec", "5.2f"), *val]
    return " | ".join(p for p in parts if p)


# ==================================================================================================
# A run on disk


def run_folder(config, resume):
    """Where the run lives. Without a name it gets one that is free; a name that is taken is
    refused."""
    if config.run:
        folder = RUNS / config.run
        if folder.exists() and not resume:
            raise ValueError(f"run {config.run!r} exists already. Go on with --run {config.run} "
                             f"--resume, choose another name, or delete {folder}.")
        return folder
    stem = "-".join([config.env.replace(",", "+"), config.algo, Path(config.model).name,
                     f"s{config.seed}"])
    stem = re.sub(r"[^\w.+=-]+", ".", stem)
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 10**6))
    return next(RUNS / n for n in names if not (RUNS / n).exists())


def make_folder(folder):
    """Claim the name; another process may have been faster since `run_folder` looked."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"another process has just begun {folder}. Choose another "
                         f"--run.") from None


def resumed_config(given):
    """The run's own config. Only `steps` and `max_context` may be raised: the rest is the run."""
    if not given.get("run"):
        raise ValueError("--resume needs --run NAME.")
    stored = load_config(given["run"])
    for name, value in given.items():
        free = ("run", "steps", "max_context", "device", "threads")
        if name not in free and value != getattr(stored, name):
            raise ValueError(f"--resume goes on with the run's own settings: {name} was "
                             f"{getattr(stored, name)!r}, got {value!r}. Start a new run for "
                             f"that.")
    config = dataclasses.replace(stored, **given)
    if config.max_context < stored.max_context:
        raise ValueError(f"--resume cannot shrink max_context: it was {stored.max_context}, "
                         f"got {config.max_context}.")
    if config.steps < stored.steps:
        raise ValueError(f"--resume cannot take steps back: the run was set to {stored.steps}, got "
                         f"{config.steps}.")
    check(config)
    return config


def load_config(run):
    """The Config of runs/RUN under the name it has now. Raises ValueError if there is none or it is
    unreadable."""
    folder = RUNS / run
    if not (folder / "config.json").exists():
        raise ValueError(nearest("run", run,
                                 sorted(p.parent.name for p in RUNS.glob("*/config.json"))))
    return dataclasses.replace(read_config(folder), run=run)


def read_config(folder):
    """The Config in folder/config.json. Raises ValueError if it is not one."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()})
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if not isinstance(value, (int, float) if f.type is float else f.type):
                raise TypeError(f"{f.name} is {value!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}.") from None
    return config


def write_whole(path, text):
    """Write beside and rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def save_checkpoint(folder, learner):
    """A plain Hugging Face folder plus trainer state: written beside, then renamed into place.

    A kill at any instant leaves a whole checkpoint: the manifest is written last, the old
    checkpoint stays until the new one has it, and a kill between the two renames is made good by
    the next reader.
    """
    current, new, old = (folder / name
                         for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    # Finish the renames of a save that was killed.
    if not current.exists() and (new / "manifest.json").exists():
        new.rename(current)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    learner.policy.model.save_pretrained(new)
    learner.policy.tokenizer.save_pretrained(new)
    critic = learner.critic and {"model": learner.critic.state_dict(),
                                 "optimizer": learner.critic_optimizer.state_dict()}
    reference = learner.reference and learner.reference.state_dict()
    torch.save({"step": learner.step, "empty_steps": learner.empty_steps,
                "optimizer": learner.optimizer.state_dict(),
                "critic": critic, "reference": reference}, new / "trainer.pt")
    files = {p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())] for p in sorted(new.iterdir())}
    write_whole(new / "manifest.json", json.dumps({"step": learner.step, "files": files}, indent=1))
    if current.exists():
        current.rename(old)
    new.rename(current)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder):
    """The newest whole checkpoint of a run, each file compared with its size and CRC in the
    manifest.

    raises: ValueError if there is none, or it is damaged
    """
    # Without `checkpoint`, a save was killed between its two renames, and `checkpoint.new` is
    # whole.
    for name in ("checkpoint", "checkpoint.new"):
        if (folder / name / "manifest.json").exists():
            break
    else:
        raise ValueError(f"{folder} has no checkpoint: it was stopped before its first one. Delete "
                         f"it and start again.")
    path = folder / name
    damaged = (f"checkpoint {path} is damaged: {{}} is not what was written. Restore it, or "
               f"delete {folder} and start again.")
    try:
        files = dict(json.loads((path / "manifest.json").read_text())["files"])
        expected = {file: (int(size), int(crc)) for file, (size, crc) in files.items()}
    except (ValueError, TypeError, KeyError):
        raise ValueError(damaged.format("manifest.json")) from None
    for file in {"config.json", "model.safetensors", "trainer.pt", *expected}:
        data = (path / file).read_bytes() if (path / file).is_file() else b""
        if (len(data), zlib.crc32(data)) != expected.get(file):
            raise ValueError(damaged.format(file))
    return path


def load_trainer_state(checkpoint, learner):
    """Optimizers, critic, reference and counters, in place. The policy's weights are loaded
    already."""
    state = torch.load(checkpoint / "trainer.pt", map_location=learner.policy.device,
                       weights_only=True)
    learner.step, learner.empty_steps = state["step"], state["empty_steps"]
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.critic:
        learner.critic.load_state_dict(state["critic"]["model"])
        learner.critic_optimizer.load_state_dict(state["critic"]["optimizer"])
    if learner.reference is not None:
        learner.reference.load_state_dict(state["reference"])


def main(argv=None):
    """The command: train, or say in one sentence why not."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config, resume, changed, why = parse(argv if argv is not None else sys.argv[1:])
        differs = ", ".join(f"{k}={v}" for k, v in changed.items()) or "nothing"
        print(f"minragen  {config.env} with {config.algo}, seed {config.seed}; {why}"
              f"{backends(config)}")
        print(f"settings  differ from the preset of {config.env}, {config.algo}, {config.model} "
              f"in: {differs}")
        train(config, resume)
    except (ValueError, ImportError, RuntimeError, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nstopped. If the run has a checkpoint, --run NAME --resume goes on from it.")


if __name__ == "__main__":
    main()
