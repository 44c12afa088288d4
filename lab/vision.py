"""Does a policy read its images? Its success with them, and with those of other instances.

    python -m lab.vision my-run      (prints a JSON list; lab/results/vision.json is one)
    make train ENV=lab.vision:Shuffled MODEL=tiny-vlm ARGS="..."   (docs/models.md)
"""

import argparse
import json
import zlib
from dataclasses import replace

import numpy as np

from minragen.environments.frozenlake import FrozenLake
from minragen.look.intervals import wilson
from minragen.run import runs
from minragen.run.groups import env_groups
from minragen.run.measure import checkpoint_player


class Shuffled(FrozenLake):
    """FrozenLake whose image shows another instance: a control without information on the board."""

    def image(self):
        other = FrozenLake(self.split, self.budget, **self.options)
        other._reset(np.random.default_rng([zlib.crc32(self.instance().encode()), self._turns]))
        return other.draw()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="+", help="folders under runs/, of FrozenLake with images")
    parser.add_argument("--size", type=int, default=256, help="test instances [256]")
    args = parser.parse_args(argv)
    measured = []
    for run in args.run:
        config = runs.load_config(run)
        play = checkpoint_player(config, run)
        for env in ("frozenlake", "lab.vision:Shuffled"):
            played = play(env_groups(replace(config, env=env), "test", args.size), greedy=False)
            (trajectories,) = played.values()
            won = sum(t.success for t in trajectories)
            low, high = wilson(won, args.size)
            measured.append({"run": run, "env": env, "success": won / args.size,
                             "interval": [round(low, 3), round(high, 3)]})
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
