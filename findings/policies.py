"""The policies that some arms begin with: broader warm-ups of tiny, and larger decoders.

    python -m findings.policies findings-broad      (a warm-up of one and a half hours; it resumes)

    narrow   one environment, one format, careless demonstrations: what a preset's warm-up shows
    pair     MetaMathQA and FrozenLake in the five formats; half of the demonstrations are the
             solver's; and texts of episodes without the frame of a conversation
    broad    the same of all ten environments

These three have the words of all environments, so the same size (0.29M), and see as many episodes
of each of their environments. In pair and broad every other episode has the format of the arms.

    1m, 5m   Countdown's own warm-up, of wider decoders
    start    what an arm begins with after its own warm-up, for its control

Each policy is the checkpoint of a run, runs/NAME, for --init-from.
"""

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import torch
import transformers

from findings.arms import ARMS, UNLUCKY
from minragen import config as settings
from minragen.chat import ChatFrame, Reply, StopReason, Trajectory
from minragen.config import preset
from minragen.envs import REGISTRY, SPLITS
from minragen.fast.policies import faster
from minragen.formats import FORMATS
from minragen.models import AdamW, Policy
from minragen.run import bundled, runs, tiny
from minragen.run.distributed import progress_bar
from minragen.run.groups import env_groups
from minragen.run.load import load_policy
from minragen.train import Learner

STEPS, SAVE_EVERY = 3000, 100  # of a broad warm-up
ROWS = 6  # episodes of each environment in a step
LONGEST = 128  # tokens of a text; one of each environment in a step


def make(names, workers):
    """Make what is missing of these policies, each in a process of its own."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda name: subprocess.run(
            [sys.executable, "-m", "findings.policies", name], check=True), sorted(names)))


def broad(envs, folder, narrow=False):
    """Warm up on `envs`, from the last checkpoint if there is one."""
    groups = {env: env_groups(preset(env), "train", ROWS) for env in envs}
    ones = [one.envs[0] for one in groups.values()]
    if begun := (folder / "checkpoint").exists():
        policy = load_policy(runs.find_checkpoint(folder), stored_dtype=True, name="tiny")
    else:  # the words of all environments, and the tags of all formats
        policy = tiny.tiny_policy([env_groups(preset(env), "train").envs[0] for env in REGISTRY],
                                  "grounding_worldmodeling")
    learner = learner_of(policy)
    if begun:
        runs.load_trainer_state(runs.find_checkpoint(folder), learner)
    with progress_bar("steps of warm-up", STEPS - learner.step) as progress:
        while learner.step < STEPS:
            step, peak = learner.step, bundled.LEARNING_RATE["tiny"]
            learner.optimizer.set_lr(peak * min((step + 1) / (STEPS / 10), 1 - step / STEPS))
            trajectories = [] if narrow else texts(policy.tokenizer, ones, step)
            for number, (env, own) in enumerate(groups.items()):
                trajectories += demonstrations(policy.tokenizer, env, own, step, number, narrow)
            learner.policy.begin_rollout()
            loss = bundled.imitate(learner.policy, trajectories)
            learner.optimizer.step(max_grad_norm=1.0)
            learner.step += 1
            progress()
            if learner.step % SAVE_EVERY == 0:
                print(f"{folder.name}: step {learner.step}  loss {loss:.3f}", flush=True)
                save(folder, learner, preset(envs[0]))


def shown(number):
    """The format of the demonstrations with this number, and whether the solver plays them."""
    others = [name for name in FORMATS if name != "free_think"]
    round_, place = divmod(number, 2 * len(others))
    return others[place // 2] if place % 2 else "free_think", bool(round_ % 2)


def demonstrations(tokenizer, env, groups, step, number, narrow):
    """Episodes of one environment, the `number`-th, in a step."""
    distinct = bundled.distinct_steps(groups, STEPS)  # the rest repeats them, in other formats
    form, solved = ("free_think", False) if narrow else shown(step + step // distinct + number)
    frame = ChatFrame(tokenizer, form, max_new_tokens=preset(
        env, response_format=form).max_new_tokens)
    return bundled.demonstrate(frame, groups, step % distinct,
                               (lambda env, rng: env.solve()[0]) if solved else None)


def texts(tokenizer, envs, step):
    """Trajectories whose only reply is a part of a text of episodes."""
    rng, found = random.Random(step), []
    for row, env in enumerate(envs):
        text = "\n".join(part for texts in tiny.recipe_of(env).texts
                         for part in texts(env, rng.randrange(tiny.TEXT_SEEDS)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first = rng.randrange(max(1, len(ids) - LONGEST))
        t = Trajectory("text", step, row, 0)
        t.add_prompt(ids[first:first + 1])
        ids = ids[first + 1:first + LONGEST]
        t.add_reply(ids, [0.0] * len(ids), turn=0)
        t.end_turn("", Reply(), StopReason.ANSWER, ("", 0.0, True, False, {}))
        found.append(t)
    return found


def wide(width, folder):
    """Countdown's warm-up of a decoder of this width."""
    if (folder / "checkpoint").exists():
        return
    config = preset("countdown")
    groups = env_groups(config, "train", bundled.BATCH["tiny"])
    tokenizer = tiny.tiny_tokenizer([env_groups(config, split).envs[0] for split in SPLITS])
    shape = tiny.tiny_config(tokenizer)
    shape.hidden_size, shape.intermediate_size = width, 3 * width
    shape.head_dim = width // shape.num_attention_heads
    policy = Policy("tiny", tiny.drawn(transformers.LlamaForCausalLM, shape), tokenizer)
    learner = learner_of(policy)
    frame = ChatFrame(tokenizer, config.response_format, max_new_tokens=config.max_new_tokens)
    losses = bundled.warm_up(learner.policy, frame, groups, config.warmup_steps)
    print(f"{folder.name}: {sum(p.numel() for p in policy.model.parameters()):,} parameters, "
          f"loss {losses[-1]:.3f}", flush=True)
    save(folder, learner, config)


def start(arm, folder):
    """The policy after an arm's own warm-up."""
    if (folder / "checkpoint").exists():
        return
    config = settings.from_options({"model": "tiny", **ARMS[arm], "run": folder.name})
    device = bundled.choose_model(config.model)[1]
    source = bundled.resolve(config.model, lambda *size: env_groups(config, *size),
                             config.response_format, config.max_new_tokens, config.warmup_steps,
                             device)
    save(folder, learner_of(load_policy(source, device, stored_dtype=True, name=config.model)),
         config)


def learner_of(policy):
    """A Learner that imitates, on a GPU if there is one."""
    policy.model.to(bundled.choose_model("tiny")[1])
    policy = faster(policy)
    return Learner(policy, ChatFrame(policy.tokenizer),
                   AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0))


def save(folder, learner, config):
    """Write the checkpoint of a run; at first also its folder and config."""
    if not folder.exists():
        runs.make_folder(folder)
        runs.write_whole(folder / "config.json", json.dumps(asdict(config), indent=1))
    runs.save_checkpoint(folder, learner)


PAIR = ("metamathqa", "frozenlake")
MAKERS = {**{f"findings-narrow-{env}": partial(broad, (env,), narrow=True) for env in PAIR},
          "findings-pair": partial(broad, PAIR),
          "findings-broad": partial(broad, tuple(REGISTRY)),
          "findings-1m": partial(wide, 144), "findings-5m": partial(wide, 320),
          **{f"findings-start-{arm}": partial(start, arm) for arm in UNLUCKY}}

if __name__ == "__main__":
    torch.set_num_threads(1)
    MAKERS[sys.argv[1]](runs.RUNS / sys.argv[1])
