"""How the model in the box got its base: imitation of weak play in the response format.

Reinforcement learning can only reinforce what is sometimes done. A model of random weights never
closes a tag, so it first imitates a scripted player that knows the *form* and plays badly on
purpose:

    reasoning   the environment's own truthful note (FrozenLake: where player and goal are)
    answer      with probability EXPERT the solver's, otherwise each action is the environment's
                habit (FrozenLake: Right) with probability HABIT, else uniform over the actions
    observation, prediction (where the format has them)
                the true relations before the answer and after it (`TextEnv.relations`)

The habit matters. The mode of a merely noisy expert *is* the expert's action, so that greedy play
would be good before any reinforcement; with a habit the mode is wrong and there is something to
learn. Demonstrations come from the training split only. The loss is on the replies only: on every
token, a model of this size spends itself on predicting observations and never learns to name
positions (LOG.md).

The result is deterministic, is kept under a key of everything that shaped it, and for the presets
is carried in the package, so that learning starts at once. Remake all of it: `make warmup`; some of
it: `python -m minragen.warmup bandit sokoban`.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from minragen.envs import (
    REGISTRY,
    SEPARATOR,
    SPLITS,
    EnvGroups,
    TextEnv,
    make,
    relations_text,
)
from minragen.models import AdamW, ChatFrame, cache_folder, fingerprint, load_policy, token_logprobs
from minragen.rollout import Trajectory, make_batch

EXPERT = TextEnv.expert  # probability that a turn is the solver's, unless an environment says else
HABIT = 0.5  # of the other turns' actions, the share that is the habit
# Below the seeds that training uses; the instances are of one split all the same.
DEMONSTRATION_SEED = 2**40
VERSION = 1  # raise it when this file changes what comes out
BATCH = {"tiny": 64, "pretrained": 8}  # demonstrations a step, half as many
LONG = 6  # where an episode may have more turns than this: it is steps that teach to copy
# Peak, after a tenth of the steps; then linearly to 0.
LEARNING_RATE = {"tiny": 3e-3, "pretrained": 1e-4}
# What `--warmup-steps -1` means; a hub model or folder gets none.
STEPS = {"tiny": 400, "pretrained": 20}
PIECE_STEPS = 2  # a test redoes this many steps and compares their probe with the carried one
ASSETS = Path(__file__).parent / "assets"


def default_steps(model_name):
    """tiny and smollm2 need a warm-up (neither ever closes a tag by itself); a user's model decides
    for itself."""
    return (STEPS["tiny"] if model_name == "tiny" else
            STEPS["pretrained"] if model_name == "smollm2" else 0)


def warm_start(policy, frame, spec, steps, options=None, budgets=None, say=print):
    """Give `policy` the weights after `steps` of warm-up: carried, cached, or made now (and then
    cached).

    The key covers the model, the tokenizer, the first batch of demonstrations (prompts, budgets,
    format, environment options and solver all show in it) and the recipe.
    """
    if steps == 0:
        return
    try:
        key = warm_key(policy, frame, spec, steps, options, budgets)
    except NotImplementedError as problem:
        raise ValueError(f"the warm-up of {spec} imitates its solve() and random_answer(), but: "
                         f"{problem} Write them, or take a pretrained model with "
                         f"--warmup-steps 0.") from None
    for folder, origin in ((ASSETS, "carried in the package"),
                           (cache_folder() / "warmup", "from the cache")):
        path = folder / f"{asset_name(policy, spec)}-{key}.safetensors"
        if path.exists() and load_warm(policy, path):
            say(f"warm-up   {steps} steps of weak play, {origin} ({path.name})")
            return
    say(f"warm-up   {steps} steps of weak play, made now and kept in {path.parent}")
    record = warm_up(policy, frame, spec, steps, options, budgets)
    save_warm(policy, path, record)


def warm_up(policy, frame, spec, steps, options=None, budgets=None, stop_after=None):
    """Imitate weak play for `steps` steps, in place. Deterministic: the same machine gives the same
    bits.

    stop_after: do only so many of them, with the schedule of all (for the test that redoes a piece)
    returns: {"loss": [...], "probe": [...]}, the loss in nats per reply token and the probe of the
        weights after PIECE_STEPS steps
    """
    kind, count = _kind(policy), batch_size(policy, spec, options, budgets)
    optimizer, record = AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0), {"loss": []}
    for step in tqdm(range(stop_after or steps), desc="warm-up", leave=False, disable=None):
        optimizer.set_lr(LEARNING_RATE[kind]
                         * min((step + 1) / max(1, steps / 10), (steps - step) / steps))
        batch = make_batch(
            demonstrate(frame, spec, count, step, options, budgets)).to(policy.device)
        total, loss_sum = int(batch.response_mask.sum()), 0.0
        # Eight of about one length at a time: little padding, and what the caches of a core hold.
        for rows in batch.lengths.argsort(stable=True).split(8):
            part = batch.take(rows)
            logprobs, _ = token_logprobs(policy.model, part.tokens, part.response_mask)
            loss = -logprobs.sum() / total
            loss.backward()
            loss_sum += float(loss.detach())
        optimizer.step(max_grad_norm=1.0)
        record["loss"].append(round(loss_sum, 6))
        if step + 1 == PIECE_STEPS:
            record["probe"] = probe(policy.model)
    return record


def demonstrate(frame, spec, count, step, options=None, budgets=None):
    """`count` trajectories of the weak player on training instances; the replies count as sampled.

    returns: list of Trajectory (logprobs 0: nobody drew them from a model)
    """
    groups = EnvGroups(spec, count, 1, "train", options, budgets)
    rng = np.random.default_rng([VERSION, step])
    trajectories, live = [], list(range(count))
    for row, observation in enumerate(groups.reset(DEMONSTRATION_SEED + step * count)):
        t = Trajectory(groups.names[row], groups.seeds[row], row, 0)
        t.given(frame.open(groups.envs[row].system_prompt, observation))
        trajectories.append(t)
    turn = 0
    while live:
        answers = [weak_answer(groups.envs[row], rng) for row in live]
        for row, answer in zip(list(live), answers):
            env, parts = groups.envs[row], {"answer": f" {answer}"}
            if frame.thinks:
                parts["reasoning"] = f" {env.note()}"
            if "observation" in frame.parts:
                parts["observation"] = f" {description(env)}"
            observation, reward, terminated, truncated, _ = env.step(answer)
            if "prediction" in frame.parts:  # it knows the future: slips and all
                parts["prediction"] = f" {description(env)}"
            ids = frame.encode(frame.write(parts))
            trajectories[row].sampled(ids, [0.0] * len(ids), turn)
            trajectories[row].turn_rewards.append(reward)
            if terminated or truncated:
                live.remove(row)
            else:
                trajectories[row].given(frame.between(ids[-1], observation))
        turn += 1
    return trajectories


def description(env):
    """The truth about the current state: its relations, or the note where nothing has a place."""
    relations = env.relations()
    return env.note() if relations is None else relations_text(relations)


def batch_size(policy, spec, options=None, budgets=None):
    """Demonstrations a step."""
    count = BATCH[_kind(policy)]
    envs = EnvGroups(spec, count, 1, "train", options, budgets).envs
    return count // 2 if max(env.budget.max_turns for env in envs) > LONG else count


def _kind(policy):
    return "tiny" if policy.name == "tiny" else "pretrained"


def weak_answer(env, rng):
    """With probability `env.expert` the solver's answer; otherwise HABIT and chance, one action at
    a time."""
    if rng.random() < env.expert:
        return env.solve()[0]
    actions = (env.random_answer(rng).split(SEPARATOR) if env.multi_action
               else [env.random_answer(rng)])
    chosen = [env.habit if env.habit and rng.random() < HABIT else a.strip() for a in actions]
    return f" {SEPARATOR} ".join(chosen)


def warm_key(policy, frame, spec, steps, options=None, budgets=None):
    """Twelve hex digits of all that shapes the weights; other settings give another key."""
    kind, count = _kind(policy), batch_size(policy, spec, options, budgets)
    first = [t.tokens for t in demonstrate(frame, spec, count, 0, options, budgets)]
    # A folder may come to hold another model.
    weights = probe(policy.model) if kind == "pretrained" else []
    return fingerprint(VERSION, policy.name, policy.model.config.to_json_string(use_diff=False),
                       frame.prefix, sorted(policy.tokenizer.get_vocab().items()), first, steps,
                       count, LEARNING_RATE[kind], EXPERT, HABIT, *weights)


def asset_name(policy, spec):
    return re.sub(r"[^a-z0-9]+", "-", f"{policy.name}-{spec}".lower()).strip("-")


def save_warm(policy, path, record):
    """Weights once each (tied ones are not repeated) with the record of how they came about."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().cpu().contiguous() for name, p in policy.model.named_parameters()}
    # Two runs may make the same weights at the same time.
    part = path.with_suffix(f".{os.getpid()}.part")
    save_file(state, part, metadata={name: json.dumps(value) for name, value in record.items()})
    part.replace(path)


def load_warm(policy, path):
    """Copy the weights of `save_warm` into the policy. A damaged file changes nothing: False."""
    try:
        stored = load_file(path, device=str(policy.device))
    except SafetensorError:
        return False
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(stored[name])
    return True


def probe(model):
    """One number per weight tensor that changes when any of its entries does: its sum against a
    cosine."""
    flat = [p.detach().cpu().double().flatten() for p in model.parameters()]
    return [float((w * torch.cos(torch.arange(len(w), dtype=torch.float64))).sum()) for w in flat]


def make_assets(names, steps):
    """Make the carried weights of the named environments anew, replacing the old ones.

    steps: environment -> number of supervised steps
    """
    for name in names:
        for stale in ASSETS.glob(f"tiny-{name}-*.safetensors"):
            stale.unlink()
        policy = load_policy("tiny", envs=[make(name, split) for split in SPLITS])
        frame, start = ChatFrame(policy.tokenizer), time.time()
        key = warm_key(policy, frame, name, steps[name])
        record = warm_up(policy, frame, name, steps[name])
        save_warm(policy, ASSETS / f"{asset_name(policy, name)}-{key}.safetensors", record)
        print(f"{name}: loss {record['loss'][0]:.3f} -> {np.mean(record['loss'][-20:]):.3f} nats "
              f"a token, {policy.num_parameters:,} parameters, {time.time() - start:.0f} s")


if __name__ == "__main__":
    from minragen.config import preset, warmup_steps  # which imports this module

    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(REGISTRY)
    make_assets(chosen, {name: warmup_steps(preset(name, model="tiny")) for name in chosen})
