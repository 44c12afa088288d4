"""How often a few tokens dominate a clipped update, and whether another KL estimator prevents it.

    python -m lab.tokens --workers 2      (hours; a stored run is not trained again)

Trains the thirty runs of docs/results.md again, those with a KL also with k3, and those of COMPARED
with each of KLS. An update whose gradient norm is above `max_grad_norm` is computed a second time
without the FEW tokens on which its loss depends most. If at least half of the norm is gone then, it
was theirs. lab/results/tokens.json has a line for each run.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from lab.environments import table
from minragen import starpo, train
from minragen.config import PRESETS, preset
from minragen.run import runs, start

STORED = Path(__file__).resolve().parent / "results" / "tokens.json"
SEEDS = (0, 1, 2)
COMPARED = ("frozenlake", "sokoban", "countdown")
FEW = 4
BOUND = 3.0  # a log ratio


def bounded(d):
    """k3, continued linearly beyond BOUND, so that no token's derivative exceeds e^3 - 1."""
    low = d.clamp(max=BOUND)
    return torch.expm1(low) - d + low.exp() * (d - low)


def cut(d):
    """k3 with the log ratio clamped at BOUND: beyond it a token has no gradient."""
    return torch.expm1(d.clamp(max=BOUND)) - d.clamp(max=BOUND)


KLS = {"k2": None, "k3": None, "k3, derivative bounded": bounded, "k3, log ratio bounded": cut}


def derivatives(policy, mini, config):
    """How the loss of a mini-batch changes with the logprob of each token, (B, T)."""
    with torch.no_grad():
        logprobs, entropy = policy.logprobs(mini.tokens, mini.response_mask, config.temperature)
    logprobs.requires_grad_()
    losses, _ = train.policy_losses(
        SimpleNamespace(logprobs=lambda *_: (logprobs, entropy)), mini, config)
    sum(losses.values()).backward()
    return logprobs.grad


def gradient_norm(optimizer):
    return float(torch.nn.utils.get_total_norm(
        [p.grad for p in optimizer.masters if p.grad is not None]))


def watched(counts):
    """`train.backward`, which adds to {what: how often}."""
    real = train.backward

    def backward(learner, mini, config, progress=lambda rows: None):
        found = real(learner, mini, config, progress)
        optimizer, norm = learner.optimizer, gradient_norm(learner.optimizer)
        counts["updates"] += 1
        counts["largest_norm"] = max(counts["largest_norm"], norm)
        if norm > config.max_grad_norm:
            kept = [p.grad for p in optimizer.masters]
            optimizer.clear()
            weights = mini.loss_weights.clone()
            most = derivatives(learner.policy, mini, config).abs().flatten().topk(FEW).indices
            weights.view(-1)[most] = 0
            real(learner, dataclasses.replace(mini, loss_weights=weights), config)
            counts["clipped"] += 1
            counts["of_few"] += gradient_norm(optimizer) < norm / 2
            for p, gradient in zip(optimizer.masters, kept):
                p.grad = gradient
        return found

    return backward


def measure(task):
    """Train a run and count. Returns its line."""
    env, kl, seed = task
    torch.set_num_threads(1)
    counts = {"updates": 0, "clipped": 0, "of_few": 0, "largest_norm": 0.0}
    estimate, real = KLS.get(kl), starpo.kl_estimate
    config = dataclasses.replace(
        preset(env), run="x", seed=seed, model="tiny", device="cpu")
    if kl:
        config = dataclasses.replace(config, kl_estimator="k2" if estimate else kl)
    patched = mock.patch.object(
        starpo, "kl_estimate", real if not estimate else lambda logprobs, ref, name="k3": (
            real(logprobs, ref, name) if name == "k3" else estimate(ref - logprobs)))
    with (patched, mock.patch.object(train, "backward", watched(counts)),
          tempfile.TemporaryDirectory() as scratch,
          mock.patch.object(runs, "RUNS", Path(scratch))):
        learner, groups, log = start.start(config, say=lambda line: None)
        with log:
            last = train.train(learner, groups, config, log)
        last |= [line for line in log.history if "val/success" in line][-1]
    # Each run has a process of its own. Its processor time does not depend on what else runs.
    return {"env": env, "kl": kl, "seed": seed, **counts, "cpu_seconds": sum(os.times()[:4])} | {
        name: last[name] for name in ("val/success", "test/success", "elapsed")}


def tasks():
    """(environment, KL or "" for none, seed) of every run."""
    for env in PRESETS["tiny"]:
        for kl in KLS if env in COMPARED else ("k2", "k3") if preset(env).kl_coef else ("",):
            yield from ((env, kl, seed) for seed in SEEDS)


def stored():
    return json.loads(STORED.read_text()) if STORED.exists() else []


def figures():
    """k2 beside k3 in each environment of COMPARED, for docs/algorithms.md."""
    def of(env, kl, name):
        return [row[name] for row in stored() if (row["env"], row["kl"]) == (env, kl)]

    return table(("environment", "largest gradient norm with k2", "with k3", "test success with k2",
                  "with k3"),
                 [[env, *(f"{max(of(env, kl, 'largest_norm')):.3g}" for kl in ("k2", "k3")),
                   *(f"{sum(of(env, kl, 'test/success')) / len(SEEDS):.3f}"
                     for kl in ("k2", "k3"))] for env in COMPARED])


def main():
    parser = argparse.ArgumentParser(prog="lab.tokens", description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    done = {(row["env"], row["kl"], row["seed"]) for row in stored()}
    missing = [task for task in tasks() if task not in done]
    with multiprocessing.get_context("spawn").Pool(
            parser.parse_args().workers, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(measure, missing):
            rows = sorted([*stored(), row], key=lambda row: (row["env"], row["kl"], row["seed"]))
            STORED.write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
