"""A tiny policy that has more to lose: the arms `broad-...` begin with its weights.

    python -m findings.broad        (hours of a core; it may be stopped, and goes on)

The warm-up of `tiny` shows one environment and one format. This one has tiny's decoder with the
words of all ten environments. Each step imitates episodes of every environment, in the five formats
in turn, half of them without a fault and half careless, and reads unmarked text: what happens in
episodes, without the frame of a conversation. The result is the checkpoint of the run NAME.
"""

import json
import random
from contextlib import nullcontext
from dataclasses import asdict
from unittest import mock

from minragen.chat import ChatFrame, Reply, StopReason, Trajectory
from minragen.config import preset
from minragen.envs import REGISTRY
from minragen.fast.policies import faster
from minragen.formats import FORMATS
from minragen.models import AdamW
from minragen.run import bundled, runs, tiny
from minragen.run.distributed import progress_bar
from minragen.run.groups import env_groups
from minragen.run.load import load_policy
from minragen.train import Learner

NAME = "findings-broad"
STEPS, SAVE_EVERY = 3000, 100
ROWS, TEXTS = 6, 6  # episodes of each environment in a step; texts
LONGEST = 256  # tokens of a text
PEAK = bundled.LEARNING_RATE["tiny"]


def main():
    folder = runs.RUNS / NAME
    groups = {env: env_groups(preset(env), "train", ROWS) for env in REGISTRY}
    envs = [one.envs[0] for one in groups.values()]
    policy = tiny.tiny_policy(envs, "grounding_worldmodeling")  # with the tags of all formats
    if begun := (folder / "config.json").exists():
        policy = load_policy(runs.find_checkpoint(folder), stored_dtype=True, name="tiny")
    learner = Learner(policy := faster(policy), ChatFrame(policy.tokenizer),
                      AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0))
    if begun:
        runs.load_trainer_state(runs.find_checkpoint(folder), learner)
    else:
        runs.make_folder(folder)
        runs.write_whole(folder / "config.json", json.dumps(asdict(preset("bandit")), indent=1))
    with progress_bar("steps of warm-up", STEPS - learner.step) as progress:
        while learner.step < STEPS:
            step = learner.step
            learner.optimizer.set_lr(PEAK * min((step + 1) / (STEPS / 10), 1 - step / STEPS))
            trajectories = texts(policy.tokenizer, envs, step)
            for number, (env, own) in enumerate(groups.items(), step):
                trajectories += demonstrations(policy.tokenizer, env, own, number)
            loss = bundled.imitate(policy, trajectories)
            learner.optimizer.step(max_grad_norm=1.0)
            learner.step += 1
            progress()
            if learner.step % SAVE_EVERY == 0:
                print(f"step {learner.step}  loss {loss:.3f}", flush=True)
                runs.save_checkpoint(folder, learner)


def demonstrations(tokenizer, env, groups, number):
    """Episodes of one environment, in the format and the style that `number` says."""
    form = list(FORMATS)[number % len(FORMATS)]
    frame = ChatFrame(tokenizer, form, max_new_tokens=preset(
        env, response_format=form).max_new_tokens)
    careful = mock.patch.object(bundled, "noisy_answer", lambda env, rng: env.solve()[0])
    distinct = bundled.distinct_steps(groups, STEPS)
    with careful if number // len(FORMATS) % 2 else nullcontext():
        return bundled.demonstrate(frame, groups, number % distinct)


def texts(tokenizer, envs, step):
    """Trajectories whose replies are texts of episodes."""
    rng, found = random.Random(step), []
    for row, env in enumerate(rng.sample(envs, TEXTS)):
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


if __name__ == "__main__":
    main()
