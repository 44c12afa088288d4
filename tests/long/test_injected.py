"""A run among faults: environments that raise or hang, updates that are not finite."""

import random
import time

import pytest
import torch
from test_kill import KILLS
from training import metrics, run

from minragen import train as trainer
from minragen.environments import limits
from minragen.environments.frozenlake import FrozenLake
from minragen.look.intervals import wilson
from minragen.run import start

LONG = KILLS >= 100


# tiny's own preset, whose warm-up is bundled.
OPTIONS = ["--env", "frozenlake", "--diagnose-every", "0", "--save-every", "30", *(
    ["--steps", "30", "--val-every", "30"] if LONG else
    ["--steps", "3", "--val-every", "3", "--num-groups", "4", "--val-size", "32"])]


def test_a_run_completes_learns_and_counts_what_was_injected(runs, monkeypatch):
    rng, injected, updates = random.Random(0), {"raised": 0, "hung": 0, "bad": 0}, []
    run("--run calm", *OPTIONS)
    step, update, build = FrozenLake.step, trainer.AdamW.step, start.build_learner

    def build_and_begin(*given):  # what the model is made from must not fail
        learner = build(*given)
        monkeypatch.setattr(FrozenLake, "step", faulty_step)
        return learner

    def faulty_step(env, answer):
        kind = rng.choices(["raised", "hung", ""], [0.1, 0.05, 0.85])[0]
        if kind:
            injected[kind] += 1
        if kind == "raised":
            raise ConnectionError("injected")
        if kind == "hung":
            time.sleep(9)
        return step(env, answer)

    def faulty_update(optimizer, max_grad_norm):
        updates.append(optimizer)
        if len(updates) % (100 if LONG else 2) == 0:
            injected["bad"] += 1
            optimizer.masters[0].grad[0] = torch.nan
        return update(optimizer, max_grad_norm)

    monkeypatch.setattr(limits, "STEP_TIME_LIMIT", 0.25)
    monkeypatch.setattr(start, "build_learner", build_and_begin)
    monkeypatch.setattr(trainer.AdamW, "step", faulty_update)
    run("--run faulty", *OPTIONS)
    calm, faulty = (metrics(runs / name) for name in ("calm", "faulty"))
    assert [line["step"] for line in faulty] == [line["step"] for line in calm]
    failed = sum(value for line in faulty for name, value in line.items()
                 if name.endswith("env_errors"))
    assert failed == injected["raised"] + injected["hung"] > 0
    assert sum(line.get("updates_skipped", 0) for line in faulty) == injected["bad"] > 0
    low, high = wilson(round(256 * calm[-2]["val/success"]), 256)
    print(injected, [line.get("val/success") for line in (calm[0], calm[-2], faulty[-2])])
    if LONG:
        assert low <= faulty[-2]["val/success"] <= high
    assert faulty[-2]["val/success"] == pytest.approx(calm[-2]["val/success"], abs=0.5)
