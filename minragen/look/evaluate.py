"""Success with its confidence interval, beside the scripted players on the same instances.

A small environment repeats instances: `distinct` counts different ones.
"""

import contextlib
import csv
import dataclasses
import json
import sys
from typing import NamedTuple

import numpy as np

from minragen.config import BUDGETS, env_names
from minragen.envs import SPLITS
from minragen.look.intervals import pass_at_k, wilson
from minragen.look.players import DEMONSTRATIONS, players, scripted
from minragen.more.vision import images_of
from minragen.support.options import nearest

# The papers' generalisation sets: name -> environment -> the options that make it.
SETS = {
    "symbols": {"sokoban": ("view=grid", "symbols=W.GCBA@"),
                "frozenlake": ("view=grid", "symbols=A.HTD*")},
    "large": {"sokoban": ("rows=8", "cols=8"), "frozenlake": ("size=6",)},
    "boxes": {"sokoban": ("rows=8", "cols=8", "boxes=2")},
    "reversed": {"bandit": ("reversed=True",)},
    "unseen": {"bandit": ("mixed=False",)},  # arm names of the split test alone
    "slippery": {"frozenlake": ("slip=0.2",)}}


class Table(NamedTuple):
    """What the players did in one environment, on the instances where no environment failed."""

    rows: list  # numbers of the instances
    players: dict  # name -> [Trajectory, ...], one for each row, the model first
    distinct: int  # different instances
    passed: dict  # k -> mean pass@k for k = 1, 2, 4, ..., samples; {} for one sample


# ---- Measuring -----------------------------------------------------------------------------------
def evaluate(groups_of, split, size, play, samples=1, greedy=True):
    """Play `size` instances of `split` with a model and the scripted players.

    groups_of: (split, number of groups, group size) -> EnvGroups
    play: (EnvGroups, whether greedily too) -> {player: trajectories}, the model's
    samples: episodes of each instance for pass@k      greedy: whether the model plays greedily, too
    returns: {environment: Table}, and the trajectories of the first player
    raises: RuntimeError if no instance is left
    """
    groups = groups_of(split, size)
    played = play(groups, greedy)
    first, again = next(iter(played.values())), [[]] * size
    if samples > 1:
        more = next(iter(play(groups_of(split, size, samples), False).values()))
        again = [more[row * samples:(row + 1) * samples] for row in range(size)]
    for name, player in players(groups_of("train", DEMONSTRATIONS)).items():
        with contextlib.suppress(NotImplementedError):
            played[name] = scripted(groups, player)
    if failed := [t.fault for ts in (*played.values(), *again) for t in ts if t.error]:
        print(f"{failed[0].traceback}env error, episodes left out: {len(failed)}. The first: "
              f"{failed[0]}", file=sys.stderr)
    groups.reset(0)
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples}) if samples > 1 else ()
    tables = {}
    for env in dict.fromkeys(groups.names):
        mine = [row for row, name in enumerate(groups.names) if name == env and not any(
            t.error for t in (*again[row], *(ts[row] for ts in played.values())))]
        if not mine:
            raise RuntimeError(f"every episode of {env} failed in its environment. See: "
                               f"python -m minragen environments {env}")
        tables[env] = Table(
            mine, {name: [ts[row] for row in mine] for name, ts in played.items()},
            len({groups.envs[row].instance() for row in mine}),
            {k: float(np.mean([pass_at_k(samples, sum(t.success for t in again[row]), k)
                               for row in mine])) for k in ks})
    return tables, first


def numbers_of(trajectories):
    """{column: number} of a player; without replies of a model `tokens` is None."""
    columns = zip(*((t.success, t.episode_return, len(t.turns), t.metrics.get(
        "reply_tokens", t.response_tokens or None), t.metrics.get("valid", 0.0))
        for t in trajectories))
    success, *means = (None if None in column else float(np.mean(column)) for column in columns)
    low, high = wilson(success * len(trajectories), len(trajectories))
    return {"success": success, "low": low, "high": high,
            **dict(zip(("return", "turns", "tokens", "valid"), means))}


def show(tables, split, subject, temperature):
    """Print a table per environment, and pass@k."""
    for env, table in tables.items():
        print(f"{env}, split {split}: {len(table.rows)} episodes, {table.distinct} distinct "
              f"instances; {subject}, sampled at temperature {temperature}")
        print(f"{'player':<22} {'success':>7}   95 % interval    {'return':>7}  {'turns':>5}  "
              f"{'tokens':>6}  {'valid':>5}")
        for name, played in table.players.items():
            f = numbers_of(played)
            tokens = "" if f["tokens"] is None else f"{f['tokens']:.1f}"
            print(f"{name:<22} {f['success']:7.3f}   [{f['low']:.3f}, {f['high']:.3f}]   "
                  f"{f['return']:7.3f}  {f['turns']:5.2f}  {tokens:>6}  {f['valid']:5.2f}")
        if table.passed:
            print("  ".join(f"pass@{k} {rate:.3f}" for k, rate in table.passed.items()))


def changed_environment(config):
    """The environment options, budgets and layers that a Config sets, as texts."""
    budgets = [f"{n}={getattr(config, n)}" for n in BUDGETS if getattr(config, n)]
    return [*config.env_arg, *budgets, *config.layer]


def write(folder, measured, split, set_name):
    """results.csv, a row for each player, and chats.jsonl, an episode a line."""
    rows = [{"subject": subject, "env": env, "options": " ".join(changed_environment(config)),
             "split": split, "set": set_name, "player": player, "episodes": len(table.rows),
             "distinct": table.distinct, **numbers_of(played), "pass@k": " ".join(
                 f"{k}:{rate:.4f}" for k, rate in table.passed.items()) * (number == 0)}
            for subject, config, tables, _ in measured for env, table in tables.items()
            for number, (player, played) in enumerate(table.players.items())]
    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
        results = csv.DictWriter(file, rows[0])
        results.writeheader()
        results.writerows(rows)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for subject, _, _, trajectories in measured:
            for t in trajectories:
                file.write(json.dumps({
                    "messages": t.messages(), **images_of(t), "subject": subject,
                    "env": t.env, "seed": t.seed, "success": t.success,
                    "return": t.episode_return, "error": t.error}) + "\n")


def of_set(config, name):
    """The Config with the options of a generalisation set, and with twice the context, since larger
    boards take more tokens."""
    if name not in SETS:
        raise ValueError(nearest("set", name, sorted(SETS)))
    if without := [env for env in env_names(config) if env not in SETS[name]]:
        raise ValueError(f"set {name} is of {', '.join(SETS[name])}, not of {', '.join(without)}.")
    options = [f"{env}.{option}" for env in env_names(config) for option in SETS[name][env]]
    return dataclasses.replace(config, env_arg=(*config.env_arg, *options),
                               max_context=2 * config.max_context)


# ---- Options -------------------------------------------------------------------------------------
def add_shared_options(parser):
    """Add what `minragen eval` and `minragen play` share: which instances, and how to play."""
    parser.add_argument("--split", default="test", metavar="{" + ",".join(SPLITS) + "}",
                        help="which instances [test]")
    parser.add_argument("--set", default="", help=f"a generalisation set: {', '.join(SETS)}")
    parser.add_argument("--checkpoint", default="", choices=("best",),
                        help="of --run: the one with the best validation [the last]")
    parser.add_argument("--temperature", type=float, help="of the sampling [val_temperature]")
    parser.add_argument("--device", default="", help="cpu, cuda or mps [cuda if there]")
    parser.add_argument("--env-arg", action="append", default=[],
                        help="environment option, as in training; may be repeated")
    parser.add_argument("--layer", action="append", default=[],
                        help="layer around the environment, as in training; may be repeated")


def parse(parser, argv, pairs):
    """The parsed options. pairs: [(option, another option without which it has no effect), ...]"""
    args = parser.parse_args(argv)
    if args.split not in SPLITS:
        parser.error(nearest("split", args.split, SPLITS))
    for name, needed in pairs:
        if getattr(args, name) not in (None, "", []) and not getattr(args, needed):
            parser.error(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}")
    return args
