"""Success with its confidence interval, beside four scripted players; or play yourself.

    python -m minragen.eval --run my-run                 (or: make eval RUN=my-run)
    python -m minragen.eval --run my-run --split val --size 1000
    python -m minragen.eval --play sokoban --seed 3      (or: make play ENV=sokoban)

All play the same instances. The random policy shows what chance earns, the solver what the budget
allows. Two shallow baselines show what is possible without learning the task: the environment's own
`shallow_answer`, and a nearest-neighbour player over the solver's episodes on DEMONSTRATIONS
training instances.

The interval is Wilson's (1927), which stays inside [0, 1] and holds near 0 and 1, where the normal
one does not. A small environment repeats instances: `distinct` counts different ones.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import re
import sys
from collections import defaultdict

import numpy as np

from minragen.envs import SPLITS, make

# torch and transformers are imported where a model is needed: `make envs` need not wait for them.

DEMONSTRATIONS = 256  # episodes of the solver that the nearest demonstration is chosen from


def wilson(successes, n, z=1.959964):
    """95 % interval of a rate: (low, high). Raises ValueError for n = 0.

        (p + z^2/2n  +-  z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    if n == 0:
        raise ValueError("wilson: got n=0, expected at least one trial.")
    p, z2 = successes / n, z * z
    middle, half = p + z2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def evaluate(config, split, size):
    """Play `size` instances of `split` with the checkpoint and the scripted players.

    returns: {environment: (rows, distinct, described)}, rows of (player, successes, n, mean
        return) over the instances on which no player's environment failed, the checkpoint first;
        described: {part: F1} of its descriptions of the state
    raises: ValueError if the run has no whole checkpoint, RuntimeError if no instance is left
    """
    from minragen import diagnostics, runs, train
    from minragen.bundled import choose_model
    from minragen.chat import ChatFrame
    from minragen.config import env_groups, env_names
    from minragen.models import load_policy

    policy = load_policy(runs.find_checkpoint(runs.RUNS / config.run),
                         choose_model(config.model, config.device)[1], stored_dtype=True)
    frame = ChatFrame(policy.tokenizer, config.response_format,
                      policy.model.generation_config.eos_token_id, config.max_new_tokens)
    groups = env_groups(config, split, size)
    played = diagnostics.play_held_out(policy, frame, groups, train.rules_of(config),
                                       config.val_temperature)
    results = {f"checkpoint{name.replace('_', ', ')}":
               [None if t.error else (t.success, t.episode_return) for t in trajectories]
               for name, trajectories in played.items()}
    training = env_groups(config, "train", DEMONSTRATIONS)
    for name, player in players(training).items():
        with contextlib.suppress(NotImplementedError):
            results[name] = scripted(groups, player)
    groups.reset(0)
    tables = {}
    for env in env_names(config):
        mine = [row for row, name in enumerate(groups.names)
                if name == env and all(outcomes[row] for outcomes in results.values())]
        if not mine:
            raise RuntimeError(f"every episode of {env} failed in its environment. See: "
                               f"python -m minragen.environments {env}")
        rows = [(player, sum(outcomes[row][0] for row in mine), len(mine),
                 np.mean([outcomes[row][1] for row in mine]))
                for player, outcomes in results.items()]
        stats = diagnostics.describe([played[""][row] for row in mine])
        described = {name: stats[name] for name in ("grounding", "worldmodeling") if name in stats}
        tables[env] = rows, len({groups.envs[row].instance() for row in mine}), described
    return tables


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
        self.where = defaultdict(list)  # feature -> the turns that have it
        for turn, (_, seen) in enumerate(found):
            for feature in seen:
                self.where[feature].append(turn)


def features(texts):
    words = re.findall(r"\w+|[^\w\s]", " ".join(texts))
    return {*words, *zip(words, words[1:])}


def scripted(groups, player):
    """(success, episode return) of one episode of a scripted player in every row; None where the
    environment failed."""
    results, rng = [], np.random.default_rng(0)
    for env, first in zip(groups.envs, groups.reset(0)):
        success, total, over = False, 0.0, False
        texts = [env.system_prompt, first]
        try:
            while not over:
                answer = player(env, texts, rng)
                observation, reward, terminated, truncated, info = env.step(answer)
                texts += answer, observation
                success, total, over = (success or info["success"] > 0, total + reward,
                                        terminated or truncated)
            results.append((success, total))
        except NotImplementedError:  # a user's environment may have no solver
            raise
        except Exception:
            results.append(None)
    return results


def play(name, split, seed, options, ask=input, say=print):
    """Let a person play seed, seed + 1, ... with the policy's prompts and rewards, until Ctrl-D."""
    env = make(name, split, **options)
    say("Type the text inside <answer>. A line that ends in \\ goes on; ? shows the solver's "
        "answer; Ctrl-D ends.\n")
    for instance in itertools.count(seed):
        observation, _ = env.reset(seed=instance)
        say(f"--- {name}, {split} seed {instance}\n{env.system_prompt}\n\n{observation}")
        total, over = 0.0, False
        while not over:
            try:
                answer = ask("> ")
                while answer.endswith("\\"):
                    answer = answer[:-1] + "\n" + ask("  ")
            except EOFError:
                return
            if answer.strip() == "?":
                say(env.solve()[0])
                continue
            observation, reward, terminated, truncated, info = env.step(answer)
            total, over = total + reward, terminated or truncated
            say(f"\n{observation}")
        say(f"--- {'success' if info['success'] else 'no success'}, return {total:.4g}\n")


def main(argv=None):
    """The command: print a table per environment, or play; exit with one sentence on an error."""
    import transformers

    from minragen.config import Config, env_options
    from minragen.runs import load_config

    parser = argparse.ArgumentParser(prog="minragen.eval", allow_abbrev=False,
                                     description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="measure a run, a folder under runs/")
    what.add_argument("--play", metavar="ENV", help="play an environment in the terminal")
    parser.add_argument("--split", default="test", choices=SPLITS, help="which instances [test]")
    parser.add_argument("--size", type=int, default=256, help="--run: number of instances [256]")
    parser.add_argument("--device", default="", help="--run: cpu, cuda or mps [cuda if there]")
    parser.add_argument("--seed", type=int, default=0, help="--play: the first instance [0]")
    parser.add_argument("--env-arg", action="append", default=[],
                        help="--play: environment option, name=value; may be repeated")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        if args.seed < 0:
            raise ValueError(f"--seed: got {args.seed}, expected at least 0.")
        if args.play is not None:
            options = env_options(Config(env=args.play, env_arg=tuple(args.env_arg)))
            return play(args.play, args.split, args.seed, options)
        if not 1 <= args.size <= 2**16:
            raise ValueError(f"--size: got {args.size}, expected 1 to {2**16}.")
        config = dataclasses.replace(load_config(args.run), device=args.device)
        show(evaluate(config, args.split, args.size), args.run, args.split,
             config.val_temperature)
    except (ValueError, ImportError, RuntimeError, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nstopped.")


def show(tables, run, split, temperature):
    """Print a table per environment, and the F1 of the checkpoint's sampled descriptions."""
    for env, (rows, distinct, described) in tables.items():
        print(f"{env}, split {split}: {rows[0][2]} episodes, {distinct} distinct instances; "
              f"run {run}, sampled at temperature {temperature}")
        print(f"{'player':<20} {'success':>8}   95 % interval    {'return':>7}")
        for name, successes, n, mean_return in rows:
            low, high = wilson(successes, n)
            print(f"{name:<20} {successes / n:8.3f}   [{low:.3f}, {high:.3f}]   {mean_return:7.3f}")
        if described:
            parts = (f"{name} {f1:.3f}" for name, f1 in described.items())
            print(f"F1 of descriptions: {', '.join(parts)}")


if __name__ == "__main__":
    main()
