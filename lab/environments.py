"""The table of the environments: budget, data, success of four scripted players, speed.

    python -m lab.environments
    python -m lab.environments --write    also into minragen/data/players.json

Each environment is measured as it is by default, and once more with the options of tiny's preset,
where there are any. `make figure` puts the stored rows into docs/.

All players play the 256 validation instances that a run validates on. `resets/s` and `turns/s` are
one process with the random policy, so that nothing but the environment is timed. Environments that
wait on something outside (`parallel`: deepcoder's sandbox, lean) step all their rows at once, as
they do in training, on all cores; the others use one.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import minragen
from minragen.config import Config, preset
from minragen.envs import REGISTRY
from minragen.look.evaluate import changed_environment
from minragen.look.intervals import wilson
from minragen.look.players import DEMONSTRATIONS, players, scripted
from minragen.run.groups import env_groups
from minragen.trajectory import Reply

SIZE = 256
STORED = Path(minragen.__file__).parent / "data" / "players.json"
HEADER = ("| env | turns x actions | bundled data | random policy | shallow player "
          "| nearest demonstration | solver | resets/s | turns/s |",
          "|---|---|---|---|---|---|---|---|---|")


def measure(config, size=SIZE):
    """One row of the table as a dict; of each player the number of successes."""
    groups = env_groups(config, "val", size)
    began = time.perf_counter()
    groups.reset(0)
    reset_seconds = time.perf_counter() - began
    # Before the players: verdicts on programs and proofs are remembered, and would be timed.
    rate, env = turn_rate(groups), groups.envs[0]
    training = env_groups(config, "train", DEMONSTRATIONS)
    outcomes = {}
    for name, player in players(training).items():
        outcomes[name] = scripted(groups, player)
        if failed := [t.fault for t in outcomes[name] if t.error]:
            raise RuntimeError(f"an episode failed in its environment: {failed[0]}")
    return {"env": config.env, "options": changed_environment(config),
            "turns": env.budget.max_turns, "actions": env.budget.max_actions_per_turn,
            "data": env.bundled_data, "size": size,
            "players": {name: sum(e.success for e in episodes)
                        for name, episodes in outcomes.items()},
            "resets_per_second": size / reset_seconds, "turns_per_second": rate}


def turn_rate(groups):
    """Turns of the random policy per second, all rows stepped together, over one episode each."""
    groups.reset(0)
    rng, live, turns, spent = np.random.default_rng(0), list(range(len(groups))), 0, 0.0
    while live:
        replies = [Reply(answer=groups.envs[row].random_answer(rng)) for row in live]
        began = time.perf_counter()
        results = groups.step(live, replies)
        spent, turns = spent + time.perf_counter() - began, turns + len(live)
        live = [row for row, result in zip(live, results)
                if not isinstance(result, Exception) and not (result[2] or result[3])]
    return turns / spent


def line(row):
    size = row["size"]
    rates = [with_interval(successes / size, size) for successes in row["players"].values()]
    name = f"{row['env']}, {', '.join(row['options'])}" if row["options"] else row["env"]
    return (f"| {name} | {row['turns']} x {row['actions']} | {row['data']} | {' | '.join(rates)} "
            f"| {row['resets_per_second']:,.0f} | {row['turns_per_second']:,.0f} |")


def table(names, rows):
    """Markdown: a table of texts."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in (names, *rows))
    return "\n".join([head, "|" + "---|" * len(names), *body])


def with_interval(rate, n):
    low, high = wilson(rate * n, n)
    return f"{rate:.2f} [{low:.2f}, {high:.2f}]"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"also write {STORED.name}")
    parser.add_argument("--size", type=int, default=SIZE, help=f"instances [{SIZE}]")
    parser.add_argument("names", nargs="*", metavar="ENV", help="which ones [all]")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in REGISTRY]
    if args.size < 1 or unknown or (args.write and args.names):
        sys.exit(f"error: got size {args.size} and {unknown or args.names or 'all'}; expected a "
                 f"size of at least 1 and names among {', '.join(REGISTRY)}, all of them with "
                 f"--write.")
    rows = []
    print("\n".join(HEADER), flush=True)
    for name in args.names or REGISTRY:
        try:
            configs = [Config(env=name), preset(name)]
            for config in configs if changed_environment(configs[1]) else configs[:1]:
                rows.append(measure(config, args.size))
                print(line(rows[-1]), flush=True)
        except (ImportError, ValueError, RuntimeError) as problem:
            sys.exit(f"error: {name}: {problem}")
    if args.write:
        STORED.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
