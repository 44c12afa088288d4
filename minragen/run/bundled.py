"""The bundled models, as ordinary Hugging Face folders: `tiny`, `tiny-vlm` and `smollm2`.

Reading order: `choose_model`, `resolve` (name to folder), `warm_up`, `demonstrate`.

Reinforcement learning can only reinforce what is sometimes done. A random model never closes a tag,
so it first imitates demonstrations in the response format:

    reasoning   pretrained models: the environment's `thought`, a sentence that leads to the answer
                tiny models: its `note`, true facts (FrozenLake: holes, player, goal, safe moves)
    answer      pretrained models: the solver's
                tiny models: the solver's with probability WarmUp.expert (tiny.py); else each
                action is the habit (FrozenLake: a safe move) with probability HABIT, or random
    observation, prediction (where the format has them)
                a perfect description of the state before the answer and after it

A pretrained model sees hundreds of demonstrations, and would learn the noise of noisy ones; a tiny
model sees a hundred thousand. The loss is on the replies only: with a loss on all tokens a tiny
model learns to predict observations, not to name positions. Only training instances are shown.

The result is cached under a key of everything that shaped it; for the presets it is bundled.
"""

import atexit
import functools
import hashlib
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minragen.cache import micro_batches
from minragen.chat import ChatFrame
from minragen.environments.data import cache_folder
from minragen.envs import SEPARATOR, SPLITS
from minragen.fast.policies import faster
from minragen.models import AdamW
from minragen.run.distributed import progress_bar
from minragen.run.groups import most_turns, shows_images
from minragen.run.load import load_policy
from minragen.run.runs import save_policy
from minragen.run.tiny import EXPERT, UNTRAINED, warm_up_of
from minragen.support.options import nearest, short
from minragen.trajectory import Reply, StopReason, Trajectory, make_batch

TINY_MODELS = tuple(UNTRAINED)  # made for their environments
BUNDLED = (*TINY_MODELS, "smollm2")
ASSETS = Path(__file__).parent.parent / "assets"
HABIT = 0.5  # probability that an action is the habit, in turns that are not the solver's
DEMONSTRATION_SEED = 2**40  # below the seeds that training uses
VERSION = 1  # raise it when this file or tiny.py changes the resulting weights
BATCH = {"tiny": 64, "pretrained": 16}  # demonstrations a step; half as many of long episodes
LONG = 6  # turns beyond which an episode is long
LEARNING_RATE = {"tiny": 3e-3, "pretrained": 3e-4}  # peak, after a tenth of the steps; then to 0
LORA_LEARNING_RATE = 1e-3  # of adapters: as fast as 1e-4 for all weights (SmolLM2)
WARMUP_TOKENS = 2400  # padded tokens in one forward pass


def choose_model(model="", device=""):
    """Model name, torch.device and the reason for both. Raises ValueError for a missing device."""
    cuda = torch.cuda.is_available()
    if device.startswith("cuda") and not cuda:
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU. Use --device cpu.")
    known = ["cpu", "cuda", "mps"]
    if device and device.partition(":")[0] not in known:
        raise ValueError(nearest("device", device, known))
    device = torch.device(device or ("cuda" if cuda else "cpu"))
    where = f"on {device} ({torch.cuda.get_device_name() if cuda else 'no GPU found'})"
    if model:
        return model, device, f"{short(model)} as asked, {where}"
    if device.type == "cpu":
        return "tiny", device, f"tiny {where}: small enough to learn in minutes on a CPU"
    if (cache_folder() / "smollm2" / "config.json").exists():
        return "smollm2", device, f"smollm2 {where}: the bundled pretrained model"
    return "tiny", device, f"tiny {where}: `make smollm2` gives a bundled pretrained model"


def resolve(name, groups_of, response_format="free_think", max_new_tokens=0, steps=0, device="cpu",
            say=print, example=False, lora_rank=0):
    """The folder or Hugging Face id that a model's name stands for, after `steps` of warm-up.

    groups_of: (split, number of groups) -> EnvGroups. `tiny`'s words are from their texts; the
        warm-up imitates their solvers.
    lora_rank: a pretrained model's warm-up trains adapters alone; the folder has them merged
    raises: ValueError for an unknown name, or for an environment that cannot be imitated
    """
    if name not in TINY_MODELS and steps == 0:
        return source_of(name)
    groups_of = functools.cache(groups_of)
    try:
        if name in TINY_MODELS:
            lora_rank = 0
            envs = [env for split in SPLITS for env in groups_of(split, None).envs]
            policy = faster(UNTRAINED[name](envs, response_format))
        else:
            policy = faster(load_policy(source_of(name), device, name in BUNDLED, name,
                                        lambda: shows_images(groups_of("train", None))))
        frame = ChatFrame(policy.tokenizer, response_format, max_new_tokens=max_new_tokens,
                          image_store=policy.image_store, example=example)
        groups = demonstration_groups(policy, groups_of)
        key = warmup_key(policy, frame, groups, steps, lora_rank)
        stem = f"{asset_stem(name, groups)}-{key}"
    except NotImplementedError as problem:
        raise ValueError(f"tiny needs random_answer(), its warm-up needs solve(), but: {problem} "
                         f"Write them, or use a pretrained model with --warmup-steps 0.") from None
    folder, origin = cache_folder() / "models" / stem, "from the cache"
    if not folder.exists():
        try:
            weights, origin = load_file(ASSETS / f"{stem}.safetensors"), "bundled weights"
            policy.model.load_state_dict(weights, strict=False)  # tied weights are there once
        except (OSError, SafetensorError):  # there are none, or they are damaged
            origin = "made now"
            warm_up(policy, frame, groups, steps, lora_rank=lora_rank)
            if name in TINY_MODELS:  # as bundled ones, which are stored in half precision
                for p in policy.model.parameters():
                    p.data = p.data.half().float()
        try:
            save_folder(policy, folder)
        except OSError as problem:  # a cache that cannot be written costs time, not the run
            say(f"warning   cannot keep the model: {problem}. Set MINRAGEN_CACHE to a folder.")
            folder = Path(tempfile.mkdtemp(prefix="minragen-")) / stem
            atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
            save_folder(policy, folder)
    if steps:
        say(f"warm-up   {steps} steps on demonstrations, {origin} ({stem})")
    return folder


def source_of(name):
    """The folder or id of a pretrained model."""
    source = cache_folder() / "smollm2" if name == "smollm2" else name
    if name == "smollm2" and not (source / "config.json").exists():
        raise ValueError("model 'smollm2' is not converted yet: run `make smollm2` once.")
    if not Path(source).is_dir() and "/" not in name:
        raise ValueError(f"{nearest('model', name, list(BUNDLED))} Or a folder or Hugging Face id.")
    return source


def save_folder(policy, folder):
    """Write model and tokenizer beside `folder` and rename, so that a kill leaves no half of it."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    save_policy(policy, part)
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.exists():  # otherwise another process has just made the same weights
            raise


# ---- The warm-up ---------------------------------------------------------------------------------
def warm_up(policy, frame, groups, steps, stop_after=None, lora_rank=0):
    """Imitate demonstrations for `steps` steps, in place and deterministically.

    stop_after: stop after so many steps, on the learning-rate schedule of `steps`
    lora_rank: add adapters and train them alone
    returns: the loss of each step, in nats per reply token
    """
    peak, losses = LEARNING_RATE[_kind(policy)], []
    if lora_rank:
        from minragen.more.lora import add_adapters

        peak = LORA_LEARNING_RATE
        add_adapters(policy, lora_rank, VERSION)
    distinct = distinct_steps(groups, steps)
    optimizer = AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0)
    with progress_bar("steps of warm-up", stop_after or steps) as progress:
        for step in range(stop_after or steps):
            optimizer.set_lr(peak * min((step + 1) / max(1, steps / 10), (steps - step) / steps))
            policy.begin_rollout()
            losses.append(imitate(policy, demonstrate(
                frame, groups, step % distinct, DEMONSTRATOR[_kind(policy)])))
            optimizer.step(max_grad_norm=1.0)
            progress()
    return losses


def imitate(policy, trajectories):
    """Backpropagate the loss of the replies. Returns it, in nats per reply token."""
    batch, loss = make_batch(trajectories).to(policy.device), 0.0
    total = int(batch.response_mask.sum())
    for rows in micro_batches(batch.tokens, batch.lengths, WARMUP_TOKENS):
        part = batch.take(rows)
        logprobs, _ = policy.logprobs(part.tokens, part.response_mask)
        share = -logprobs.sum() / total
        share.backward()
        loss += float(share.detach())
    return loss


def demonstration_groups(policy, groups_of):
    """Training environments for a step of demonstrations, each a group of its own."""
    count = BATCH[_kind(policy)]
    long = most_turns(groups_of("train", None)) > LONG
    return groups_of("train", count // 2 if long else count)


def distinct_steps(groups, steps):
    """The number of steps whose demonstrations differ. Later steps repeat them."""
    return min([steps, *(warm_up_of(env).distinct or steps for env in groups.envs)])


def noisy_answer(env, rng):
    """With the WarmUp's probability the solver's answer; else each action is habit or random."""
    its = warm_up_of(env)
    if rng.random() < its.expert:
        return env.solve()[0]
    habit, answer = its.habit(env), env.random_answer(rng)
    actions = answer.split(SEPARATOR) if env.multi_action else [answer]
    return f" {SEPARATOR} ".join(habit if habit and rng.random() < HABIT else action.strip()
                                 for action in actions)


DEMONSTRATOR = {"tiny": noisy_answer, "pretrained": lambda env, rng: env.solve()[0]}


def demonstrate(frame, groups, step, answer_of=noisy_answer):
    """Trajectories of a demonstrator, one per row of `groups`, with logprobs of 0.

    answer_of: (environment, rng) -> the answer of a turn
    """
    rng = np.random.default_rng([VERSION, step])
    trajectories, live = [], list(range(len(groups)))
    for row, observation in enumerate(groups.reset(DEMONSTRATION_SEED + step * len(groups))):
        if isinstance(observation, Exception):
            raise observation
        t = Trajectory.begin(groups, row, observation)
        t.add_prompt(frame.first_prompt_ids(frame.system_message(groups.envs[row]), observation))
        trajectories.append(t)
    while live:
        parts = {}  # row -> the parts of its reply
        for row in live:
            env = groups.envs[row]
            thought = env.note() if answer_of is noisy_answer else env.thought()
            parts[row] = {"answer": f" {answer_of(env, rng)}", "reasoning": f" {thought}"}
            if frame.describes:
                parts[row]["observation"] = f" {env.describe()}"
        # The last answer is executed only where its outcome has to be predicted.
        played = [row for row in live if groups.envs[row].turns_left > 1 or frame.describes]
        outcomes = dict(zip(played, groups.step(
            played, [Reply(answer=parts[row]["answer"][1:]) for row in played])))
        for row in live:
            t, outcome = trajectories[row], outcomes.get(row, ("", 0.0, True, False, {}))
            if isinstance(outcome, Exception):
                raise outcome
            if frame.describes:  # knows the future, slips included
                parts[row]["prediction"] = f" {groups.envs[row].describe()}"
            ids = frame.encode(frame.write(parts[row]))
            t.add_reply(ids, [0.0] * len(ids), turn=len(t.turns))
            t.end_turn("", Reply(), StopReason.ANSWER, outcome)
            if t.stop:
                live = [r for r in live if r != row]
            else:
                t.add_prompt(frame.next_prompt_ids(ids[-1], t.observation))
    return trajectories


def warmup_key(policy, frame, groups, steps, lora_rank=0):
    """Twelve hex digits of everything that shapes the weights, except this file and tiny.py. A tiny
    model's key does not depend on the version of transformers."""
    kind = _kind(policy)
    # The first demonstrations show prompts, budgets, format, environment options and solver.
    first = [t.tokens for t in demonstrate(frame, groups, 0, DEMONSTRATOR[kind])] if steps else []
    if kind == "tiny":
        model = [(name, *p.shape) for name, p in policy.model.named_parameters()]
    else:  # a folder's model may change. CRC of bytes: a float sum varies with the threads
        model = [policy.model.config.to_json_string(use_diff=False), *(
            zlib.crc32(p.detach().cpu().contiguous().view(torch.uint8).numpy())
            for p in policy.model.parameters())]
    things = (VERSION, policy.name, model, frame.prefix,
              sorted(policy.tokenizer.get_vocab().items()), first, steps,
              distinct_steps(groups, steps), len(groups), LEARNING_RATE[kind], EXPERT, HABIT,
              *groups.layers, *([LORA_LEARNING_RATE, lora_rank] if steps and lora_rank else []))
    return hashlib.sha256("\0".join(map(str, things)).encode()).hexdigest()[:12]


def asset_stem(name, groups):
    """The readable part of a warm-started model's file name."""
    names = "-".join(dict.fromkeys(groups.names))
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{names}".lower()).strip("-")


def checksums(model):
    """Per weight tensor its dot product with cos(0), cos(1), ..., which any entry changes."""
    flat = [p.detach().cpu().double().flatten() for p in model.parameters()]
    return [float((w * torch.cos(torch.arange(len(w), dtype=torch.float64))).sum()) for w in flat]


def _kind(policy):
    return "tiny" if policy.name in TINY_MODELS else "pretrained"
