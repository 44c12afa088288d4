"""What a rollout costs when environments answer late, with a picture.

    python -m lab.waiting      (two minutes; best with nothing else running)

128 rows play five turns. A step takes 20 ms, and 2 s once in twenty times. The untrained `tiny`
replies with up to 32 tokens. lab/results/waiting.json has the seconds of each seed with each share,
and the times of ROWS rows of the last one, which lab/figure.py draws.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch

from lab.environments import table
from minragen.chat import ChatFrame
from minragen.envs import Budget, Outcome, TextEnv
from minragen.rollout import Rules, collect
from minragen.run.groups import PatientGroups
from minragen.run.tiny import tiny_policy
from minragen.support.metrics import waiting_metrics

STORED = Path(__file__).resolve().parent / "results" / "waiting.json"
SHARES, SEEDS, ROWS = (1.0, 0.25), (0, 1, 2, 3, 4), 12
USUAL, STALL, STALL_PROBABILITY = 0.02, 2.0, 0.05  # seconds, seconds, in a step


class Stalling(TextEnv):
    """Count to five, at a server that sometimes takes long."""

    instruction, actions = "Count to five.", ("1", "2", "3", "4", "5")
    budget = Budget(max_turns=5, max_actions_per_turn=1, max_actions=5)
    parallel, waits = True, True

    def _reset(self, rng):
        self.number, self.slept = int(rng.integers(1000)), 0.0

    def step(self, answer):
        seconds = STALL if self.dynamics.random() < STALL_PROBABILITY else USUAL
        if self.waits:
            time.sleep(seconds)
            self.slept += seconds
        return super().step(answer)

    def _act(self, action):
        return Outcome(0.0)

    def render(self):
        return f"Number {self.number}"


def main():
    torch.set_num_threads(1)
    groups = PatientGroups("lab.waiting:Stalling", 128, 1)
    made = type(groups.envs[0])  # not Stalling: this file is __main__
    made.waits = False  # while the tokenizer is made from episodes
    policy, made.waits = tiny_policy(groups.envs), True
    frame = ChatFrame(policy.tokenizer)
    frame.end_ids |= set(range(0, len(policy.tokenizer), 16))  # replies of many lengths
    rows, timeline = [], {}
    for seed in SEEDS:
        for share in SHARES:
            began = time.time()  # the clock of Turn.times
            played = collect(policy, frame, groups, 1000 * seed,
                             Rules(max_new_tokens=32, feed_share=share))
            rows.append({"seed": seed, "share": share, "seconds": time.time() - began,
                         "longest_wait": max(env.slept for env in groups.envs),
                         **waiting_metrics(played)})
            print(json.dumps(rows[-1]), flush=True)
            timeline[str(share)] = [[[when - began for when in turn.times] for turn in t.turns]
                                    for t in played[:ROWS]]
    text = json.dumps({"runs": rows, "timeline": timeline})
    STORED.write_text(text.replace("}, {", "},\n {") + "\n")


def stored():
    return json.loads(STORED.read_text())


def figures():
    """Medians over the seeds, for docs/performance.md."""
    columns = {"seconds": "seconds", "longest_wait": "seconds of the slowest row's environment",
               "rollout_idle": "`rollout_idle`"}
    return table(("`feed_share`", *columns.values()), [
        [f"{share:g}", *(f"{np.median([r[c] for r in stored()['runs'] if r['share'] == share]):.2f}"
                         for c in columns)] for share in SHARES])


if __name__ == "__main__":
    main()
