"""Runs of pretrained models: what they are trained on and what that changes on held-out instances.

    .venv/bin/python -m lab.pretrained v2-sokoban-filter --seed 0

trains runs/NAME-sSEED, or goes on with it, and prints its row. Before and after are the
first and the last validation of the run: the same held-out instances, sampled. RUNS has what
differs from the preset of pretrained models.
"""

import argparse
import json
import os
import platform
import subprocess
import sys

import torch

from minragen.look.intervals import difference, wilson
from minragen.run import runs

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
# RAGEN V1 (arXiv 2504.20073): PPO with 8 groups of 16, up to 5 actions a turn, replies of up to 400
# tokens; without the filter also without its higher clip. Its KL penalty of .001 is left out: for
# PPO the released script never switches it on.
V1 = dict(model=QWEN, algo="ppo", lam=1, credit="episode", filter="none", clip_high=0.2,
          max_new_tokens=400, max_context=3600)
STARPO_S = V1 | dict(algo="starpo-s", filter="top_k", clip_high=0.28)
SEVERAL = dict(max_actions_per_turn=5, max_actions=10)
V1_ENVS = {"bandit": dict(env="bandit"),
           "sokoban": dict(env="sokoban", env_arg="view=grid", **SEVERAL),
           "frozenlake": dict(env="frozenlake", env_arg="slip=0.6667", **SEVERAL)}
# RAGEN V2's main table: 400 steps, with the filter "softmax top-p of 0.9, zeros included".
V2 = V1 | dict(env="sokoban", clip_high=0.28, steps=400, aggregation="seq-mean-token-mean",
               val_size=512)
SMOLLM2 = {f"smollm2-{env}": dict(env=env, model="smollm2")
           for env in ("frozenlake", "lean")}
# The field's control: what an agent gains from rewards that do not depend on what it does.
CONTROLS = {f"{name}-random": options | dict(layer="random_reward")
            for name, options in SMOLLM2.items()}
RUNS = {**SMOLLM2, **CONTROLS} | {f"v1-{env}{name}": options | own for env, own in V1_ENVS.items()
        for name, options in (("", V1), ("-starpo-s", STARPO_S))} | {
    "v2-sokoban": V2,
    "v2-sokoban-filter": V2 | dict(filter="top_p_softmax")}


def train(name, seed, given):
    """Train a run to its end. Returns its folder."""
    run = f"{name}-s{seed}"
    command = [sys.executable, "-m", "minragen.train", "--run", run]
    if (runs.RUNS / run / "config.json").exists():
        command += ["--resume"]
    else:
        command += [f"--{option.replace('_', '-')}={value}" for option, value in {
            **RUNS[name], "seed": seed, **given}.items()]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return runs.RUNS / run


def row_of(config, lines):
    """Success and valid replies before and after, with 95 % intervals, minutes of training steps,
    and the machine.

    lines: those of the run's metrics.jsonl
    """
    validated = [line for line in lines if "val/success" in line]
    n, found = config.val_size, {}
    for when, line in (("before", validated[0]), ("after", validated[-1])):
        rate = line["val/success"]
        found[when] = (rate, *map(float, wilson(rate * n, n)))
        found[f"valid {when}"] = line.get("val/valid")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**found, "after - before": difference(found["before"], found["after"]), "n": n,
            "steps": validated[-1]["step"],
            "minutes": sum(line.get("seconds", 0.0) for line in lines) / 60, "machine": card}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="in place of the run's own: a folder, or an id")
    parser.add_argument("--device")
    args = parser.parse_args()
    given = {option: value for option in ("model", "device") if (value := getattr(args, option))}
    folder = train(args.name, args.seed, given)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    print(json.dumps({folder.name: row_of(runs.read_config(folder), list(lines))}, indent=1))


if __name__ == "__main__":
    main()
