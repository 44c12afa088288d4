"""The leaderboard: algorithms in five environments, and language models in all ten.

    make leaderboard ARGS="--workers 2"                     train what is missing; it may be stopped
    make leaderboard ALGO=my_algo:preset ENV=bandit         your own algorithm beside the others
    make leaderboard MODEL=smollm2                          a model that was not trained
    make leaderboard ARGS="--api http://localhost:8000/v1 --api-model NAME"

An algorithm trains `tiny` with each of RATES times its preset's learning rate and seed TUNING_SEED,
takes the rate of the best validation (the preset's among equals), and trains SEEDS with it. Every
run has all steps of the preset, unless no group teaches anything any more. A row of
lab/results/leaderboard.json is a run, one of lab/results/leaderboard-models.json a model in an
environment. What is stored is not repeated; a run whose preset, or whose module, has changed counts
as missing. docs/results.md shows both files.

Reading order: `main`; `train_algorithms`, `fill`, `measure`; `replicates` (the bootstrap),
`algorithms_table`, `verdicts`; `evaluate_models`, `models_table`.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import transformers
from scipy.stats import rankdata

from lab.environments import table
from minragen import config as settings
from minragen import eval as evaluation
from minragen import train
from minragen.envs import REGISTRY
from minragen.look.evaluate import numbers_of
from minragen.look.faults import Parser, fault_of, told
from minragen.run import measure as measuring
from minragen.run import runs, start
from minragen.support.checks import estimator_kind
from minragen.support.options import nearest

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "lab" / "results" / "leaderboard.json"
MODELS = ROOT / "lab" / "results" / "leaderboard-models.json"
PAGE = "docs/results.md"
# Minutes of a core that a run takes; with a critic it takes CRITIC times as long.
MINUTES = {"bandit": 0.3, "deepcoder": 1, "frozenlake": 3.2, "sokoban": 4.6, "webshop": 4.1}
CRITIC = 1.1
RATES = {"1": 1.0, "1/3": 1 / 3, "3": 3.0}  # times the learning rate of the preset
TUNING_SEED, SEEDS = 100, (0, 1, 2)
SIZE = 64  # test instances that a model plays
DRAWS = 4000  # replicates of the bootstrap
# What no algorithm may change: the task, and how much of it is played.
TASK = ("env_arg", "layer", "max_turns", "max_actions_per_turn", "max_actions", "max_new_tokens",
        "max_context", "warmup_steps", "steps", "num_groups", "group_size", "val_size",
        "val_temperature")
QUICK = dict(steps=2, num_groups=2, group_size=4, val_size=8, val_every=2)


def main(argv=None):
    """The command. Ends with one sentence on an error."""
    parser = Parser(prog="lab.leaderboard", description=__doc__.split("\n")[0])
    parser.add_argument("--algo", help="presets, or module:preset; with commas [all]")
    parser.add_argument("--env", help="environments, with commas [the leaderboard's]")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time [1]")
    parser.add_argument("--again", action="store_true", help="forget the stored runs of these")
    parser.add_argument("--quick", action="store_true",
                        help="does it run? two steps, by default of grpo in bandit; not stored")
    parser.add_argument("--model", default="", help="smollm2, a folder or a Hugging Face id")
    parser.add_argument("--api", default="", help="address of a server that has the model")
    parser.add_argument("--api-model", default="", help="the model's name there")
    parser.add_argument("--warmup-steps", type=int, default=0,
                        help="--model: supervised steps on demonstrations in each environment [0]")
    parser.add_argument("--size", type=int, default=SIZE, help=f"--model: instances [{SIZE}]")
    parser.add_argument("--device", default="", help="--model: as of minragen.eval")
    args = parser.parse_args(argv)
    of_model = [f"--{name.replace('_', '-')}={value}"
                for name in ("model", "api", "api_model", "device", "size")
                if (value := getattr(args, name)) != parser.get_default(name)]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if of_model and (args.algo or args.quick):
        parser.error("a model takes neither --algo nor --quick")
    if args.warmup_steps and not args.model:
        parser.error("--warmup-steps needs --model")
    if of_model and not (args.model or args.api):
        parser.error(f"{of_model[0]} needs --model or --api")
    if args.model in settings.PRESETS:
        parser.error(f"{args.model} plays easier versions of the environments; it has a row")
    if args.workers < 1:
        parser.error(f"--workers: got {args.workers}, expected at least 1")
    known = [*(REGISTRY if of_model else MINUTES)]
    envs = args.env.split(",") if args.env else known
    for env in envs:
        if env not in known:
            parser.error(nearest("env", env, known))
    try:
        if of_model:
            evaluate_models(of_model, envs, args.warmup_steps, args.again)
        else:
            train_algorithms(args, envs)
    except Exception as problem:
        sys.exit(told(problem))
    except KeyboardInterrupt:
        sys.exit("\nstopped. The same command goes on.")


# ---- Runs of algorithms --------------------------------------------------------------------------
def train_algorithms(args, envs):
    """Train the missing runs, print where the algorithms stand, and write the page."""
    algos = args.algo.split(",") if args.algo else [*settings.ALGOS]
    with contextlib.ExitStack() as scratch:
        path, changes = STORED, {}
        if args.quick:
            path = Path(scratch.enter_context(tempfile.TemporaryDirectory())) / "rows.json"
            changes = QUICK
            algos, envs = algos if args.algo else ["grpo"], envs if args.env else ["bandit"]
        pairs = list(dict.fromkeys((env, algo) for env in envs for algo in algos))
        for env, algo in pairs:  # refuse before anything is trained
            settings.check(next(iter(candidates(env, algo, **changes).values())))
            config, usual = settings.preset(env, algo), settings.preset(env)
            for name in TASK:
                if getattr(config, name) != getattr(usual, name):
                    sys.exit(f"error: algo {algo}: all algorithms have the same {name} in {env}, "
                             f"{getattr(usual, name)!r}.")
        if args.again:
            store(path, drop=lambda row: (row["env"], row["algo"]) in pairs)
        print(forecast(pairs, args.workers, path, changes), flush=True)
        work = partial(fill, path=path, changes=changes)
        with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
            try:
                for pair in as_completed([pool.submit(work, pair) for pair in pairs]):
                    if problem := pair.result():
                        sys.exit(f"error: {problem}")
            except BaseException:  # else it would wait for the runs of the others
                for worker in multiprocessing.active_children():
                    worker.kill()
                raise
        done = finished(stored(path), changes)
        print(algorithms_table(done))
        if args.quick:
            print("It runs. Two steps say nothing about success, and nothing is stored.")
            return
        for algo in algos if args.algo else ():
            print("\n".join(verdicts(algo, done)))
    write_page()


def candidates(env, algo, **changes):
    """{key: Config} of the runs that an algorithm may need in an environment: each rate with each
    seed, TUNING_SEED first. changes: options of all of them"""
    base = settings.preset(env, algo)
    own = dict(device="cpu", val_every=base.steps, save_every=base.steps) | changes
    made = [dataclasses.replace(base, seed=seed, lr=float(f"{base.lr * rate:.3g}"), **own)
            for seed in (TUNING_SEED, *SEEDS) for rate in RATES.values()]
    return {key_of(config, base.lr): config for config in made}


def key_of(config, *more):
    """A hash of what a row depends on: the options that are not their defaults, so that a new
    option changes no key; `more`; the module of a user's algorithm.

    NOTE: a change of a default in config.py or of the code is not seen. `--again` trains anew.
    """
    module = sys.modules.get(config.algo.rpartition(":")[0])
    text = json.dumps([more, module and Path(module.__file__).read_text(), {
        f.name: value for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) != f.default}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def forecast(pairs, workers, path, changes):
    """How many runs are missing, and how long they take."""
    rows, minutes, missing, each = stored(path), 0.0, 0, len(RATES) + len(SEEDS)
    for env, algo in pairs:
        configs = candidates(env, algo, **changes)
        mine = [rows[key]["minutes"] for key in configs if key in rows]
        critic = estimator_kind(next(iter(configs.values()))) == "critic"
        usual = np.mean(mine) if mine else MINUTES[env] * (CRITIC if critic else 1)
        missing, minutes = missing + each - len(mine), minutes + (each - len(mine)) * usual
    if not missing:
        return f"all {len(pairs) * each} runs are stored"
    minutes /= workers
    took = ("a minute" if minutes < 1.5 else f"{minutes:.0f} minutes" if minutes < 120 else
            f"{minutes / 60:.1f} hours")
    return (f"{missing} of {len(pairs) * each} runs to train, {workers} at a time: "
            f"{'seconds each' if changes else f'about {took}'}")


def fill(pair, path, changes):
    """Train what is missing of an algorithm in an environment, run by run. Returns the sentence of
    a failure, if there is one: not every exception can be sent to another process."""
    try:
        fill_rows(*pair, path, changes)
    except Exception as problem:
        return f"{fault_of(problem)}"


def fill_rows(env, algo, path, changes):
    configs = candidates(env, algo, **changes)
    store(path, drop=lambda row: (row["env"], row["algo"]) == (env, algo)
          and row["key"] not in configs)

    def done(key):
        if key not in stored(path):
            if (parent := multiprocessing.parent_process()) and not parent.is_alive():
                os._exit(1)  # the command was killed; an executor would survive sys.exit()
            row = measure(configs[key])
            store(path, {**row, "key": key})
            print(f"{env:11} {algo:13} lr {row['lr']:<8g} seed {row['seed']:<3}  validation "
                  f"{row['val']:.2f}  test {row['test']:.2f}  {row['minutes']:.1f} min", flush=True)
        return stored(path)[key]

    tried = [done(key) for key, config in configs.items() if config.seed == TUNING_SEED]
    best = max(tried, key=lambda row: row["val"])
    for key, config in configs.items():
        if config.seed != TUNING_SEED and config.lr == best["lr"]:
            done(key)


def measure(config):
    """Train a run in a scratch folder. Returns its row: success and share of valid replies, both
    sampled; minutes of a core, whatever else the machine does. A policy that diverges has 0 of
    each."""
    settings.check(config)  # in a new process this imports a user's algorithm
    last, began, said = {}, core_minutes(), io.StringIO()
    with (tempfile.TemporaryDirectory() as scratch, mock.patch.object(runs, "RUNS", Path(scratch)),
          contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)):
        learner, groups, log = start.start(dataclasses.replace(config, run="x"),
                                           say=lambda line: None)
        with contextlib.suppress(FloatingPointError):  # it has diverged
            with log:
                if not (final := train.train(learner, groups, config, log)):
                    sys.exit(130)  # SIGTERM or Ctrl-C
            last = [line for line in log.history if "val/success" in line][-1] | final
    base = settings.preset(config.env, config.algo).lr
    rate = min(RATES, key=lambda name: abs(RATES[name] * base - config.lr))
    return {"env": config.env, "algo": config.algo, "rate": rate, "lr": config.lr,
            "seed": config.seed, "steps": learner.step, "size": config.val_size,
            **{name: round(last.get(metric, 0.0), 4) for name, metric in (
                ("val", "val/success"), ("test", "test/success"), ("valid", "test/valid"))},
            "minutes": round(core_minutes() - began, 2)}


def core_minutes():
    """Minutes that cores have spent on this process and on those that it has waited for."""
    return sum(os.times()[:4]) / 60


def stored(path):
    """{key: row} of a file; {} if there is none."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return {row["key"]: row for row in rows}


def store(path, *rows, drop=lambda row: False):
    """Add rows to a file, without those that `drop` names. Other processes may do so, too."""
    with open(path.with_name("leaderboard.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {key: row for key, row in stored(path).items() if not drop(row)}
        kept |= {row["key"]: row for row in rows}
        lines = sorted(json.dumps(row) for row in kept.values())
        runs.write_whole(path, "[" + ",\n ".join(lines) + "]\n")


def write_page():
    from lab import figure  # which imports this file

    (ROOT / PAGE).write_text(figure.rewritten(PAGE))
    print(f"wrote {PAGE}")


# ---- Where the algorithms stand ------------------------------------------------------------------
def finished(rows, changes=None):
    """{algo: {env: its rows, one for each of SEEDS}} where all of today's presets are stored; an
    algorithm of a user's module counts as it was stored."""
    done = {}
    for algo in dict.fromkeys([*settings.ALGOS, *(row["algo"] for row in rows.values())]):
        for env in MINUTES:
            mine = [row for row in rows.values() if (row["env"], row["algo"]) == (env, algo)
                    and row["seed"] in SEEDS]
            if algo in settings.ALGOS:
                known = candidates(env, algo, **(changes or {}))
                mine = [row for row in mine if row["key"] in known]
            if len(mine) == len(SEEDS):
                done.setdefault(algo, {})[env] = mine
    return done


def replicates(rates, size):
    """Success in bootstrap replicates: the seeds are drawn with replacement, and for each seed the
    successes among its `size` instances are drawn again.

    rates: (A, E, S), algorithms x environments x seeds      returns: (DRAWS, A, E), means over S
    """
    rng = np.random.default_rng(0)
    picked = rng.integers(rates.shape[2], size=(DRAWS, *rates.shape))
    seeds = np.take_along_axis(rates[None], picked, axis=3)
    return rng.binomial(size, seeds).mean(axis=3) / size


def over_environments(drawn):
    """(DRAWS, A): means over environments that are drawn with replacement, in a replicate the same
    ones for all algorithms. drawn: (DRAWS, A, E)"""
    draws, _, count = drawn.shape
    picked = np.random.default_rng(1).integers(count, size=(draws, 1, count))
    return np.take_along_axis(drawn, picked, axis=2).mean(axis=2)


def interval(values):
    """The 95 % interval of replicates: (low, high), over axis 0."""
    return np.quantile(values, (0.025, 0.975), axis=0)


def rates_of(done, algos, envs):
    """Test success, (A, E, S)."""
    return np.array([[[row["test"] for row in done[algo][env]] for env in envs] for algo in algos])


def algorithms_table(done=None):
    """A row for each algorithm: those with all environments by rank, then the others."""
    done = finished(stored(STORED)) if done is None else done
    if not done:
        return "No run is stored yet."
    complete = [algo for algo in done if len(done[algo]) == len(MINUTES)]
    complete.sort(key=lambda algo: -rates_of(done, [algo], MINUTES).mean())
    head = {}
    if complete:
        size = done[complete[0]]["bandit"][0]["size"]
        drawn = replicates(rates_of(done, complete, MINUTES), size)
        ranks = interval(rankdata(-over_environments(drawn), axis=1))
        for place, algo in enumerate(complete):
            low, high = np.floor(ranks[0, place]), np.ceil(ranks[1, place])
            head[algo] = [f"{place + 1} [{low:.0f}, {high:.0f}]",
                          f"{rates_of(done, [algo], MINUTES).mean():.3f}"]
    rows = []
    for algo in [*complete, *(algo for algo in done if algo not in complete)]:
        rank, mean = head.get(algo, ("", ""))
        success = (done[algo].get(env) for env in MINUTES)
        rows.append([rank, f"`{algo}`", mean, *(
            f"{np.mean([row['test'] for row in mine]):.2f}" if mine else "" for mine in success)])
    return table(("rank", "`ALGO`", "mean", *MINUTES), rows)


def verdicts(mine, done):
    """A line for each other algorithm that has the environments of `mine`: is it above or below by
    more than the noise?"""
    envs = [*done[mine]]
    lines = [f"{mine} in {', '.join(envs)}: its mean test success less that of the others, with "
             f"the 95 % interval"]
    # In one order, and drawn together, so that two algorithms differ alike from either side.
    names = sorted(algo for algo in done if {*envs} <= {*done[algo]})
    rates = rates_of(done, names, envs)
    drawn = over_environments(replicates(rates, done[mine][envs[0]][0]["size"]))
    drawn, means = dict(zip(names, drawn.T)), dict(zip(names, rates.mean(axis=(1, 2))))
    for other in names:
        if other != mine:
            low, high = interval(drawn[mine] - drawn[other])
            word = "above" if low > 0 else "below" if high < 0 else "within the noise of"
            lines.append(f"  {word:19} {other:13} {means[mine] - means[other]:+.3f} "
                         f"[{low:+.3f}, {high:+.3f}]")
    return lines


# ---- Models --------------------------------------------------------------------------------------
def evaluate_models(of_model, envs, warmup_steps=0, again=False):
    """Let a model play SIZE test instances of each environment as it is by default, beside the
    scripted players. of_model: options of minragen.eval"""
    for env in envs:
        args = evaluation.arguments(["--env", env, "--size", f"{SIZE}", *of_model])
        (name, config, _), = measuring.subjects(args)
        config = dataclasses.replace(config, warmup_steps=warmup_steps)
        key = key_of(config, args.size)
        name += f", {warmup_steps} supervised steps" * bool(warmup_steps)
        if key in stored(MODELS) and not again:
            continue
        minutes = [row["minutes"] for row in stored(MODELS).values() if row["env"] == env]
        print(f"{env}: {args.size} instances" + (
            f"; models before took {min(minutes):.0f} to {max(minutes):.0f} minutes"
            if minutes else ""), flush=True)
        began = time.monotonic()
        asked = args.api_model or name  # a server is asked by the name that measure gets
        played = measuring.measure(asked, config, "", args, greedy=False)[2][env].players
        row = {"env": env, "model": name, "size": args.size, "key": key,
               "minutes": round((time.monotonic() - began) / 60, 1), "players": {
                   player if place else "model": {"episodes": len(episodes), **{
                       column: round(numbers_of(episodes)[column], 4)
                       for column in ("success", "valid")}}
                   for place, (player, episodes) in enumerate(played.items())}}
        store(MODELS, row, drop=lambda old, row=row: all(
            old[part] == row[part] for part in ("env", "model", "size")))
    write_page()


def models_table():
    """A row for each model, the random policy and the shallow player, on the same instances."""
    rows = [row for row in stored(MODELS).values() if row["size"] == SIZE]
    if not rows:
        return "No model is stored yet."
    found = {}  # {player: {env: {"episodes", "success", "valid"}}}
    for row in rows:
        for player, numbers in row["players"].items():
            if player not in ("nearest demonstration", "solver"):
                name = f"`{row['model']}`" if player == "model" else player
                found.setdefault(name, {})[row["env"]] = numbers
    lines = []
    for name in sorted(found, key=lambda name: not name.startswith("`")):
        cells = [found[name].get(env) for env in REGISTRY]
        whole = None not in cells
        lines.append([name, f"{np.mean([c['success'] for c in cells]):.3f}" if whole else "",
                      *(f"{c['success']:.2f}" if c else "" for c in cells),
                      f"{np.mean([c['valid'] for c in cells]):.2f}" if whole else ""])
    return table(("player", "mean", *REGISTRY, "valid"), lines)


if __name__ == "__main__":
    main()
