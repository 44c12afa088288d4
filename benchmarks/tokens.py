"""How often a clipped update is that of a few tokens.

    python -m benchmarks.tokens readme-bandit-grpo-s0 ...    prints a JSON line for each run
    python -m benchmarks.tokens --kl k3 readme-...           with another KL: see ESTIMATES

Each run is trained again from its config.json. An update whose gradient norm is above
`max_grad_norm` is computed a second time without the FEW tokens on which its loss depends most. If
at least half of the norm is gone then, it was theirs. runs/readme-tokens.json has the lines of the
table in docs/algorithms.md.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from minragen import starpo, train
from minragen.run import runs, start

ROOT = Path(__file__).resolve().parent.parent
FEW = 4
BOUND = 3.0  # log ratio


def bounded(d):
    """k3 whose derivative stays that of a token 20 times less likely than before."""
    low = d.clamp(max=BOUND)
    return torch.expm1(low) - d + low.exp() * (d - low)


# What the KL may be, beside k2 and k3: a function of log ref - log pi.
ESTIMATES = {"k3-bounded": bounded,
             "k3-cut": lambda d: torch.expm1(d.clamp(max=BOUND)) - d.clamp(max=BOUND)}


def derivatives(policy, mini, config):
    """How the loss of a mini-batch changes with the logprob of each token, (B, T)."""
    with torch.no_grad():
        logprobs, entropy = policy.logprobs(mini.tokens, mini.loss_mask, config.temperature)
    logprobs.requires_grad_()
    losses, _ = train.policy_losses(
        SimpleNamespace(logprobs=lambda *_: (logprobs, entropy)), mini, config)
    sum(losses.values()).backward()
    return logprobs.grad


def gradient_norm(learner):
    return float(torch.nn.utils.get_total_norm(
        [p.grad for p in learner.optimizer.masters if p.grad is not None]))


def watched(learner, counts):
    """`train.gradients`, which adds to {what: how often} of the updates."""
    def gradients(learner, mini, config, progress=lambda rows: None):
        found = train.gradients(learner, mini, config, progress)
        norm = gradient_norm(learner)
        counts["largest norm"] = max(counts["largest norm"], norm)
        counts["updates"] += 1
        if norm > config.max_grad_norm:
            kept = [None if p.grad is None else p.grad.clone() for p in learner.optimizer.masters]
            learner.optimizer.clear()
            weights = mini.loss_weights.clone()
            most = derivatives(learner.policy, mini, config).abs().flatten().topk(FEW).indices
            weights.view(-1)[most] = 0
            train.gradients(learner, dataclasses.replace(mini, loss_weights=weights), config)
            counts["clipped"] += 1
            counts["of few tokens"] += gradient_norm(learner) < norm / 2
            learner.optimizer.clear()
            for p, gradient in zip(learner.optimizer.masters, kept):
                p.grad = gradient
        return found

    learner.gradients = gradients


def measure(config):
    """Train a run of this Config and count."""
    counts = {"updates": 0, "clipped": 0, "of few tokens": 0, "largest norm": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        runs.RUNS = Path(folder)
        learner, groups, log = start.start(config, say=lambda line: None)
        watched(learner, counts)
        with log:
            final = train.train(learner, groups, config, log)
    return counts | {name: final[f"test/{name}"] for name in ("success", "success_greedy")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--kl", default="", choices=("k2", "k3", *ESTIMATES))
    args = parser.parse_args()
    if estimate := ESTIMATES.get(args.kl):
        starpo.kl_estimate = lambda logprobs, ref, name="k3": estimate(ref - logprobs)
    for name in args.runs:
        config = runs.read_config(ROOT / "runs" / name)
        kl = args.kl if args.kl in ("k2", "k3") else config.kl_estimator
        config = dataclasses.replace(config, threads=1, val_every=config.steps, kl_estimator=kl)
        print(json.dumps({"run": name, "kl": args.kl, **measure(config)}), flush=True)


if __name__ == "__main__":
    main()
