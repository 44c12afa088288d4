"""Success with its confidence interval, beside four scripted players; compare runs; or play.

    python -m minragen.eval --run my-run                     (or: make eval RUN=my-run)
    python -m minragen.eval --run my-run --set large --samples 8
    python -m minragen.eval --run "a b"                      runs on the same instances
    python -m minragen.eval --env bandit,lean --model tiny   (or: make eval ENV=bandit,lean)
    python -m minragen.eval --env bandit --api http://localhost:8000/v1 --api-model NAME
    python -m minragen.eval --play sokoban --seed 3          (or: make play ENV=sokoban)
    python -m minragen.eval --run my-run --show --seed 3     (or: make play RUN=my-run)

All play the same instances. The random policy shows what chance earns, the solver what the budget
allows. Two shallow baselines show what is possible without learning the task: the environment's own
`shallow_answer`, and a nearest-neighbour player over the solver's episodes on DEMONSTRATIONS
training instances.

The interval is Wilson's (1927), which stays inside [0, 1] and holds near 0 and 1, where the normal
one does not. A small environment repeats instances: `distinct` counts different ones.

Reading order: `wilson`, `pass_at_k`, `sign_test`, `evaluate`, `players`, `play`, `show_run`,
`main`.
"""

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy

from minragen.chat import Reply
from minragen.envs import IMAGE, SPLITS, image_of, make, nearest, parse_options
from minragen.look import faults

# torch and transformers are imported where a model is needed: `make envs` need not wait for them.
# scipy imports scipy.stats when it is first used, and that takes half a second: leave it to scipy.

DEMONSTRATIONS = 256  # episodes of the solver that the nearest demonstration is chosen from
SHOWN = 3  # instances of a run's policy that are printed where nobody can press Enter
# The papers' generalisation sets: name -> environment -> the options that make it.
SETS = {
    "symbols": {"sokoban": ("view=grid", "symbols=W.GCBA@"),
                "frozenlake": ("view=grid", "symbols=A.HTD*")},
    "large": {"sokoban": ("rows=8", "cols=8"), "frozenlake": ("size=6",)},
    "boxes": {"sokoban": ("rows=8", "cols=8", "boxes=2")},
    "reversed": {"bandit": ("reversed=True",)},
    "unseen": {"bandit": ("mixed=False",)},  # the names of the split test
    "slippery": {"frozenlake": ("slip=0.2",)}}


class Episode(NamedTuple):
    """What came of an episode."""

    success: bool
    episode_return: float
    turns: int
    valid: float  # share of its turns
    tokens: int | None = None  # of a model's replies


class Table(NamedTuple):
    """What the players did in one environment, on the instances where no environment failed."""

    rows: list  # numbers of the instances
    players: dict  # name -> [Episode, ...], one for each row, the model first
    distinct: int  # different instances
    described: dict  # part of the format -> F1 of the model's descriptions
    passed: dict  # k -> pass@k


# ---- Statistics ----------------------------------------------------------------------------------
def wilson(successes, n):
    """95 % interval of a rate: (low, high). Raises ValueError for n = 0.

    successes: rounded to a whole number, for a caller that has a rate times n
    """
    return scipy.stats.binomtest(round(successes), n).proportion_ci(method="wilson")


def pass_at_k(n, successes, k):
    """Probability that k of n samples, drawn without replacement, contain a success: an unbiased
    estimate of that of k samples (Chen et al. 2021, section 2.1).

        1 - binom(n - successes, k) / binom(n, k)

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: got k={k} of {n} samples, expected 1 to {n}.")
    return 1 - math.comb(n - successes, k) / math.comb(n, k)


def sign_test(first, second):
    """Two-sided p of an exact sign test: how often a fair coin would divide the instances that
    only one of two players solved as unevenly, or more.

    first, second: numbers of instances that only this one solved
    """
    return scipy.stats.binomtest(first, first + second).pvalue if first + second else 1.0


# ---- Measuring -----------------------------------------------------------------------------------
def evaluate(config, split, size, play, samples=1):
    """Play `size` instances of `split` with a model and the scripted players.

    play: (EnvGroups, whether greedily too) -> {player: trajectories}, the model's
    samples: episodes of each instance for pass@k
    returns: {environment: Table}, and the trajectories of the first player
    raises: RuntimeError if no instance is left
    """
    from minragen.config import env_names
    from minragen.rollout import describe
    from minragen.run.groups import env_groups

    groups = env_groups(config, split, size)
    played = play(groups, True)
    results = {name: [None if t.error else Episode(
        t.success, t.episode_return, len(t.turns), t.metrics.get("valid", 0.0),
        t.metrics.get("reply_tokens", t.response_tokens or None))
        for t in trajectories] for name, trajectories in played.items()}
    first, again = next(iter(played.values())), []
    if samples > 1:
        again = next(iter(play(env_groups(config, split, size, samples), False).values()))
    training = env_groups(config, "train", DEMONSTRATIONS)
    failed = [t.fault for ts in (*played.values(), again) for t in ts if t.error]
    for name, player in players(training).items():
        with contextlib.suppress(NotImplementedError):
            results[name], gone = scripted(groups, player)
            failed += gone
    faults.warn(failed)
    groups.reset(0)
    tables = {}
    for env in env_names(config):
        mine = [row for row, name in enumerate(groups.names)
                if name == env and all(episodes[row] for episodes in results.values())
                and not any(t.error for t in again[row * samples:(row + 1) * samples])]
        if not mine:
            raise RuntimeError(f"every episode of {env} failed in its environment. See: "
                               f"python -m minragen.environments {env}")
        stats = describe([first[row] for row in mine])
        tables[env] = Table(
            mine, {name: [episodes[row] for row in mine] for name, episodes in results.items()},
            len({groups.envs[row].instance() for row in mine}),
            {name: stats[name] for name in ("grounding", "worldmodeling") if name in stats},
            passed([again[row * samples:(row + 1) * samples] for row in mine], samples))
    return tables, first


def passed(instances, samples):
    """{k: mean pass@k} for k = 1, 2, 4, ..., samples; {} for one sample."""
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    return {k: float(np.mean([pass_at_k(samples, sum(t.success for t in same), k)
                              for same in instances])) for k in ks} if samples > 1 else {}


def checkpoint_player(config, run="", say=print, only=""):
    """A `play` of `evaluate` for a run's checkpoint, or for the model that a run of this Config
    would begin with. Raises ValueError if the run has no whole checkpoint.

    only: "best": the checkpoint of the best validation
    """
    from minragen.rollout import play_held_out
    from minragen.run import distributed, runs, start
    from minragen.run.proof import prove
    from minragen.train import rules_of

    policy, frame = start.load(dataclasses.replace(config, attention=""), run and
                               runs.find_checkpoint(runs.RUNS / run, say, only), say)
    name = (only or "checkpoint") if run else config.model

    proved = not policy.image_store

    def play(groups, greedy=True, first_seed=0):
        nonlocal proved
        if not proved:  # does its tower take images of this size?
            policy.image_store.expect(groups.reset(first_seed))
            prove(policy, config.max_context)
            proved = True
        with distributed.progress_bar(f"evaluation on {groups.split}: tokens sampled") as progress:
            held = play_held_out(policy, frame, groups, rules_of(config), config.val_temperature,
                                 progress, greedy, first_seed)
        return {f"{name}{suffix.replace('_', ', ')}": t for suffix, t in held.items()}

    return play


def of_set(config, name):
    """The Config with the options of a generalisation set, and with twice the context, since larger
    boards take more tokens."""
    from minragen.config import env_names

    if name not in SETS:
        raise ValueError(nearest("set", name, sorted(SETS)))
    options = [f"{env}.{option}" for env in env_names(config) for option in SETS[name].get(env, ())]
    without = [env for env in env_names(config) if env not in SETS[name]]
    if without:
        raise ValueError(f"set {name} is of {', '.join(SETS[name])}, not of {', '.join(without)}.")
    changed = {option.partition("=")[0].partition(".")[2] for option in options}
    kept = [o for o in config.env_arg if o.partition("=")[0].rpartition(".")[2] not in changed]
    return dataclasses.replace(config, env_arg=(*kept, *options),
                               max_context=2 * config.max_context)


# ---- Scripted players ----------------------------------------------------------------------------
def players(training):
    """{name: function (env, texts, rng) -> answer} of the baselines. `texts` is what a model has
    seen: system prompt, observation, answer, observation, ...; `training` is EnvGroups."""
    return {"random policy": lambda env, texts, rng: env.random_answer(rng),
            "shallow player": lambda env, texts, rng: env.shallow_answer(texts),
            "nearest demonstration": NearestDemonstration(training),
            "solver": lambda env, texts, rng: env.solve()[0]}


class NearestDemonstration:
    """Answer as the solver did in the most similar conversation of training.

        similarity = sum of idf over the shared features / sqrt(features of the demonstration)

    The features of a conversation are its words, its signs, and pairs of adjacent ones.
    """

    def __init__(self, training):
        self.training, self.answers = training, []

    def __call__(self, env, texts, rng):
        if not self.answers:
            self._record()
        scores = np.zeros(len(self.answers))
        for feature in features(texts) & self.where.keys():
            where = self.where[feature]
            scores[where] += math.log(len(scores) / len(where))
        return self.answers[np.argmax(scores / self.norms)]

    def _record(self):
        """Fill in the answer and the features of every turn of the solver."""
        found = []

        def solve(env, texts, rng):
            found.append((env.solve()[0], features(texts)))
            return found[-1][0]

        scripted(self.training, solve)
        self.answers = [answer for answer, _ in found]
        self.norms = np.sqrt([len(seen) for _, seen in found])
        where = defaultdict(list)  # feature -> the turns that have it
        for turn, (_, seen) in enumerate(found):
            for feature in seen:
                where[feature].append(turn)
        self.where = {feature: np.array(turns) for feature, turns in where.items()}


def features(texts):
    words = re.findall(r"\w+|[^\w\s]", " ".join(texts))
    return {*words, *zip(words, words[1:])}


def scripted(groups, player):
    """The Episodes of a scripted player, one a row, None where the environment failed; and the
    Faults."""
    failed, rngs = [], [np.random.default_rng([0, row]) for row in range(len(groups))]
    texts = [[env.system_prompt, first] for env, first in zip(groups.envs, groups.reset(0))]
    turns, results, live = [[] for _ in texts], [None] * len(texts), [*range(len(texts))]
    while live:
        answers = {}
        for row in live:
            try:
                answers[row] = player(groups.envs[row], texts[row], rngs[row])
            except NotImplementedError:  # a user's environment may have no solver
                raise
            except Exception as error:  # the environment failed
                failed.append(faults.fault_of(error))
        live = []
        for row, outcome in zip(answers, groups.step(
                [*answers], [Reply(answer=answer) for answer in answers.values()])):
            if isinstance(outcome, Exception):
                failed.append(faults.fault_of(outcome))
                continue
            observation, reward, terminated, truncated, info = outcome
            texts[row] += answers[row], observation
            turns[row].append((info["success"] > 0, reward, info["valid"]))
            if terminated or truncated:
                success, rewards, valid = zip(*turns[row])
                results[row] = Episode(any(success), sum(rewards), len(valid),
                                       sum(valid) / len(valid))
            else:
                live.append(row)
    return results, failed


def play(name, split, seed, options, ask=input, say=print):
    """Let a person play seed, seed + 1, ... with the policy's prompts and rewards, until Ctrl-D.
    A terminal with 24-bit colours also shows the images."""
    env = make(name, split, **options)
    say("Type the text inside <answer>. A line that ends in \\ goes on; ? shows the solver's "
        "answer; Ctrl-D ends.\n")
    for instance in itertools.count(seed):
        observation, _ = env.reset(seed=instance)
        say(f"--- {name}, {split} seed {instance}\n{env.system_prompt}\n\n{shown(observation)}")
        total, over = 0.0, False
        while not over:
            try:
                answer = ask("> ")
                while answer.endswith("\\"):
                    answer = answer[:-1] + "\n" + ask("  ")
            except EOFError:
                return
            if answer.strip() in ("", "?"):  # neither costs a turn
                say(env.solve()[0] if answer.strip() else "Type an answer.")
                continue
            observation, reward, terminated, truncated, info = env.step(answer)
            total, over = total + reward, terminated or truncated
            say(f"\n{shown(observation)}")
        say(f"--- {'success' if info['success'] else 'no success'}, return {total:.4g}\n")


def show_run(run, config, split, seed, only="", ask=input, say=print):
    """Show a run's policy play the instances from `seed` on, turn by turn, as `make eval` samples
    it: Enter goes on, Ctrl-D ends. Without a terminal it prints SHOWN instances; of a mixture, as
    many rounds of its environments as that takes."""
    from minragen.chat import FORMATS
    from minragen.run.groups import env_groups

    waits, groups = sys.stdin.isatty(), env_groups(config, split)
    prefix = FORMATS[config.response_format].partition("{")[0]  # of every reply, never sampled
    policy_plays = checkpoint_player(config, run, only=only)
    say(f"run {run} plays {config.env}, sampled at temperature {config.val_temperature:g} (greedy: "
        f"--temperature 0).{' Enter goes on, Ctrl-D ends.' if waits else ''}")
    seeds = itertools.count(seed, len(groups)) if waits else range(seed, seed + SHOWN, len(groups))
    with contextlib.suppress(EOFError):
        for first in seeds:
            (played,) = policy_plays(groups, False, first).values()
            for env, t in zip(groups.envs, played):
                prompt = f"\n{env.system_prompt}\n" if first == seed else ""
                say(f"\n--- {t.env}, {split} seed {t.seed}{prompt}")
                show_episode(t, prefix, ask if waits else lambda: None, say, boards_of(env, t))


def boards_of(env, t):
    """The board before each turn of a Trajectory and after the last, as symbols; "" for none."""
    from minragen.environments.board import Board

    boards = [""] * (1 + len(t.turns))
    if isinstance(env, Board):
        env.reset(seed=t.seed, options={"member": t.member})
        for k in range(len(boards)):
            boards[k] = env.grid()
            if k < len(t.turns) - bool(t.error):  # the last answer may have failed there
                env.step(t.turns[k].reply.answer)
    return boards


def show_episode(t, prefix, wait, say, boards):
    """Print a Trajectory: what its policy saw and replied, and what it earned."""
    for turn, board in zip(t.turns, boards):
        say(shown(turn.observation, board))
        wait()
        say(f"> {prefix}{faults.printable(turn.text)}\n")
    if t.error:
        say(f"{t.fault.traceback}{t.fault}")
    end = "env error" if t.error else "success" if t.success else "no success"
    rewards = " + ".join(f"{reward:.4g}" for reward in t.turn_rewards)
    say(f"{shown(t.observation, boards[-1])}\n--- {end}, return {t.episode_return:.4g}"
        f"{f' = {rewards}' if len(t.turns) > 1 else ''}")
    wait()


def shown(observation, board=""):
    """An observation for this terminal: with its image, if it has the colours for it, and with the
    board, if the model sees only coordinates."""
    colours = sys.stdout.isatty() and os.environ.get("COLORTERM") in ("truecolor", "24bit")
    text, image = faults.printable(observation), image_of(observation)
    if image is not None and colours:
        return text.replace(IMAGE, half_blocks(image))
    return text if board in text else f"{text}\n{board}"


def half_blocks(image):
    """An image for a terminal: each character is two pixels, the upper one as its own colour and
    the lower one as its background.

    image: (H, W, 3) uint8; of an odd H the last row is shown twice
    """
    image = np.pad(image, ((0, len(image) % 2), (0, 0), (0, 0)), mode="edge")
    return "\n".join("".join("\33[38;2;{};{};{};48;2;{};{};{}m▀".format(*upper, *lower)
                             for upper, lower in zip(*rows)) + "\33[0m"
                     for rows in zip(image[::2], image[1::2]))


# ---- The command ---------------------------------------------------------------------------------
def main(argv=None):
    """The command: print a table per environment, or play; end with one sentence on an error."""
    import transformers

    args = arguments(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        for name, least, most in (("seed", 0, 2**62), ("size", 1, 2**16), ("samples", 1, 2**10)):
            if not least <= getattr(args, name) <= most:
                raise ValueError(f"--{name}: got {getattr(args, name)}, expected {least} to "
                                 f"{most}.")
        if args.play is not None:
            return play(args.play, args.split, args.seed, parse_options(args.env_arg))
        chosen = subjects(args)
        if args.show:
            return show_run(*chosen[0][:2], args.split, args.seed, args.checkpoint)
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
        measured = [measure(*subject, args) for subject in chosen]
        if args.out:
            write(Path(args.out), measured, args)
        for other in measured[1:] if args.run else ():
            compare(measured[0], other)
    except Exception as problem:
        sys.exit(faults.told(problem))
    except KeyboardInterrupt:
        sys.exit("\nstopped.")


def arguments(argv):
    """The parsed options. Exits with a sentence for those that do not go together."""
    parser = faults.Parser(prog="minragen.eval", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", help="measure runs, folders under runs/; the first is compared with "
                                    "the others")
    what.add_argument("--env", help="measure a model that was not trained, in these environments")
    what.add_argument("--play", metavar="ENV", help="play an environment in the terminal")
    parser.add_argument("--show", action="store_true",
                        help="--run: watch its policy play instead, turn by turn")
    parser.add_argument("--model", default="", help="--env: as in training, with its presets")
    parser.add_argument("--api", default="", metavar="URL",
                        help="--env: ask a model behind an OpenAI-compatible server ...")
    parser.add_argument("--api-model", default="", metavar="NAME", help="... of this name")
    parser.add_argument("--checkpoint", default="", choices=("best",),
                        help="--run: the one of the best validation [the last one]")
    parser.add_argument("--split", default="test", metavar="{" + ",".join(SPLITS) + "}",
                        help="which instances [test]")
    parser.add_argument("--set", default="", help=f"a generalisation set: {', '.join(SETS)}")
    parser.add_argument("--size", type=int, default=256, help="number of instances [256]")
    parser.add_argument("--samples", type=int, default=1, help="episodes of each for pass@k [1]")
    parser.add_argument("--temperature", type=float, help="of the sampling [val_temperature]")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="write results.csv and chats.jsonl (OpenAI's messages) there")
    parser.add_argument("--device", default="", help="cpu, cuda or mps [cuda if there]")
    parser.add_argument("--seed", type=int, default=0,
                        help="--play, --show: the first instance [0]")
    parser.add_argument("--env-arg", action="append", default=[],
                        help="--env, --play: environment option, name=value; may be repeated")
    args = parser.parse_args(argv)
    if (args.run, args.env, args.play) == (None, None, None):
        parser.error("give --run NAME, --env ENV or --play ENV")
    if args.split not in SPLITS:
        parser.error(nearest("split", args.split, SPLITS))
    for name, needed in (("api_model", "api"), ("api", "api_model"), ("api", "env"),
                         ("model", "env"), ("checkpoint", "run"), ("show", "run")):
        if getattr(args, name) and not getattr(args, needed):
            parser.error(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}")
    if args.show and len(args.run.split()) > 1:
        parser.error("--show takes one run")
    measured = ("set", "temperature", "device", "out", "size", "samples")
    for mode, unused in (("run", ("env_arg",) if args.show else ("env_arg", "seed")),
                         ("env", ("seed",)), ("show", measured[3:]), ("play", measured)):
        for name in unused if getattr(args, mode) not in (None, False) else ():
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} has no effect with --{mode}")
    return args


def subjects(args):
    """What is measured: [(name, Config, run or ""), ...]. Whatever can be refused is refused here,
    before anything is played."""
    from minragen.config import changed_environment, check, from_options
    from minragen.run import runs
    from minragen.run.bundled import choose_model

    changes = dict(device=args.device)
    if args.temperature is not None:
        changes["val_temperature"] = args.temperature
    if args.run is not None:
        found = [(run, runs.load_config(run), run) for run in args.run.split() or [""]]
        for name, config, _ in found:
            runs.find_checkpoint(runs.RUNS / name, lambda line: None, args.checkpoint)
            tasks = [" ".join([c.env, *changed_environment(c)]) for c in (found[0][1], config)]
            if tasks[0] != tasks[1]:
                raise ValueError(f"{found[0][0]} and {name} cannot be compared: they play "
                                 f"{tasks[0]!r} and {tasks[1]!r}. Evaluate each by itself.")
    else:
        model = args.model or args.api_model or choose_model("", args.device)[0]
        found = [(args.api_model or model, from_options(dict(
            env=env, model=model, env_arg=tuple(  # those of other environments are not its own
                o for o in args.env_arg if o.partition("=")[0].rpartition(".")[0] in ("", env)))),
            "") for env in args.env.split(",")]
    found = [(name, dataclasses.replace(config, **changes), run) for name, config, run in found]
    for _, config, _ in found:
        check(config)
    return [(name, of_set(config, args.set) if args.set else config, run)
            for name, config, run in found]


def measure(name, config, run, args):
    """Evaluate one subject and print its tables. Returns (name, Config, tables, trajectories)."""
    if args.api:
        from minragen.more.api import Server

        server = Server(args.api, name, config.response_format, config.max_new_tokens,
                        config.val_temperature)

        def play(groups, greedy):
            return {name: server.collect(groups)}
    else:
        play = checkpoint_player(config, run, only=args.checkpoint)
    tables, trajectories = evaluate(config, args.split, args.size, play, args.samples)
    show(tables, f"{args.split}{' ' + args.set if args.set else ''}",
         f"{'run' if run else 'model'} {name}", config.val_temperature)
    if args.api:
        print(f"the server counted {server.prompt_tokens:,} tokens of prompts and "
              f"{server.reply_tokens:,} of replies")
    return name, config, tables, trajectories


COLUMNS = ("success", "low", "high", "return", "turns", "tokens", "valid")


def numbers_of(episodes):
    """{column: number} of a player; without replies of a model `tokens` is None."""
    n, successes = len(episodes), sum(e.success for e in episodes)
    low, high = wilson(successes, n)
    means = {column: None if None in values else float(np.mean(values)) for column, values in (
        ("return", [e.episode_return for e in episodes]), ("turns", [e.turns for e in episodes]),
        ("tokens", [e.tokens for e in episodes]), ("valid", [e.valid for e in episodes]))}
    return {"success": successes / n, "low": low, "high": high, **means}


def show(tables, split, subject, temperature):
    """Print a table per environment, pass@k, and the F1 of the model's sampled descriptions."""
    for env, table in tables.items():
        print(f"{env}, split {split}: {len(table.rows)} episodes, {table.distinct} distinct "
              f"instances; {subject}, sampled at temperature {temperature}")
        print(f"{'player':<22} {'success':>7}   95 % interval    {'return':>7}  {'turns':>5}  "
              f"{'tokens':>6}  {'valid':>5}")
        for name, episodes in table.players.items():
            f = numbers_of(episodes)
            tokens = "" if f["tokens"] is None else f"{f['tokens']:.1f}"
            print(f"{name:<22} {f['success']:7.3f}   [{f['low']:.3f}, {f['high']:.3f}]   "
                  f"{f['return']:7.3f}  {f['turns']:5.2f}  {tokens:>6}  {f['valid']:5.2f}")
        if table.passed:
            print("  ".join(f"pass@{k} {rate:.3f}" for k, rate in table.passed.items()))
        if table.described:
            parts = (f"{name} {f1:.3f}" for name, f1 in table.described.items())
            print(f"F1 of descriptions: {', '.join(parts)}")


def compare(one, other):
    """Print how often two runs differ on the same instances, and the sign test's p."""
    for env, table in one[2].items():
        for player in list(table.players)[:2]:
            left, right = (dict(zip(t.rows, t.players[player])) for t in (table, other[2][env]))
            pairs = [(left[row].success, right[row].success) for row in left.keys() & right.keys()]
            counts = [pairs.count(pair) for pair in itertools.product((True, False), repeat=2)]
            print(f"{env}, {player}: both {counts[0]}, {one[0]} alone {counts[1]}, {other[0]} "
                  f"alone {counts[2]}, neither {counts[3]}; sign test p = "
                  f"{sign_test(counts[1], counts[2]):.3g}")


def write(folder, measured, args):
    """results.csv, a row for each player, and chats.jsonl, an episode a line."""
    from minragen.config import changed_environment

    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["subject", "env", "options", "split", "set", "player", "episodes",
                       "distinct", *COLUMNS, "pass@k"])
        for subject, config, tables, _ in measured:
            for env, table in tables.items():
                for number, (player, episodes) in enumerate(table.players.items()):
                    passes = " ".join(f"{k}:{rate:.4f}" for k, rate in table.passed.items())
                    rows.writerow([
                        subject, env, " ".join(changed_environment(config)), args.split, args.set,
                        player, len(episodes), table.distinct, *numbers_of(episodes).values(),
                        passes if number == 0 else ""])
    from minragen.more.vision import images_of

    with open(folder / "chats.jsonl", "w") as file:
        for subject, _, _, trajectories in measured:
            for t in trajectories:
                file.write(json.dumps({
                    "messages": t.messages(), **images_of(t), "subject": subject,
                    "env": t.env, "seed": t.seed, "success": t.success,
                    "return": t.episode_return, "error": t.error}) + "\n")


if __name__ == "__main__":
    main()
