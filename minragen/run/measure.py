"""What `minragen.eval` measures: runs and models become players, and players become tables.

Tests: `python -m pytest tests/test_eval.py`.
"""

import dataclasses
from functools import partial
from pathlib import Path

from minragen.config import check, from_options
from minragen.look import evaluate
from minragen.look.diagnostics import max_positions
from minragen.look.play import show_run
from minragen.run import distributed, runs, start
from minragen.run.bundled import choose_model
from minragen.run.groups import check_environments, collect, env_groups
from minragen.run.proof import prove
from minragen.support.options import short
from minragen.train import rules_of


def main(args):
    """Evaluate what is asked for, print the tables and store them."""
    chosen = subjects(args)
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    measured = [measure(*subject, args) for subject in chosen]
    if args.out:
        evaluate.write(Path(args.out), measured, args.split, args.set)


def show(args):
    """Print a few episodes of a run's policy."""
    [(run, config, _)] = subjects(args)
    show_run(run, config, env_groups(config, args.split),
             checkpoint_player(config, run, only=args.checkpoint), args.seed)


def subjects(args):
    """What is measured: [(name, Config, run or ""), ...]; refuses before anything is played."""
    changes = dict(device=args.device)
    if args.temperature is not None:
        changes["val_temperature"] = args.temperature
    if args.run is not None:
        names = [*dict.fromkeys(args.run.split())] or [""]
        found = [(run, runs.load_config(run), run) for run in names]
        for name, config, _ in found:
            runs.check_files(config)
            runs.find_checkpoint(runs.RUNS / name, lambda line: None, args.checkpoint)
    else:
        model = args.model or args.api_model or choose_model("", args.device)[0]
        found = [(short(args.api_model or model), from_options(dict(
            env=env, model=model, layer=tuple(args.layer),
            env_arg=tuple(  # without ENV.name=value of others
                o for o in args.env_arg if o.partition("=")[0].rpartition(".")[0] in ("", env)))),
            "") for env in args.env.split(",")]
    found = [(name, dataclasses.replace(config, **changes), run) for name, config, run in found]
    for _, config, _ in found:
        check(config)
        check_environments(config)
    return [(name, evaluate.of_set(config, args.set) if args.set else config, run)
            for name, config, run in found]


def measure(name, config, run, args, greedy=True):
    """Evaluate one subject and print its tables. Returns (name, Config, tables, trajectories).

    greedy: whether a local model (no --api) plays greedily, too, which takes twice as long
    """
    if args.api:
        from minragen.more.api import Server  # which needs a package of its own
        server = Server(args.api, args.api_model, config.response_format, config.max_new_tokens,
                        config.val_temperature, config.example)

        def play(groups, greedy):
            return {name: server.collect(groups)}
    else:
        play = checkpoint_player(config, run, only=args.checkpoint)
    tables, trajectories = evaluate.evaluate(
        partial(env_groups, config), args.split, args.size, play, args.samples, greedy)
    evaluate.show(tables, f"{args.split}{' ' + args.set if args.set else ''}",
                  f"{'run' if run else 'model'} {name}", config.val_temperature)
    if args.api:
        print(f"the server counted {server.prompt_tokens:,} tokens of prompts and "
              f"{server.reply_tokens:,} of replies")
    return name, config, tables, trajectories


def checkpoint_player(config, run="", say=print, only=""):
    """A `play` of `evaluate.evaluate` for a run's checkpoint (`only` "best": that of the best
    validation), or for the model that a run of this Config would begin with. Raises ValueError if
    the run has no whole checkpoint."""
    policy, frame = start.load(dataclasses.replace(config, attention=""), run and
                               runs.find_checkpoint(runs.RUNS / run, say, only), say)
    if not (run or policy.image_store):  # a run has proved its model
        prove(policy, min(config.max_context, max_positions(policy.model)))
    name = (only or "checkpoint") if run else short(config.model)

    def play(groups, greedy=True, first_seed=0):
        if policy.image_store:  # does its tower take images of this size?
            policy.image_store.expect(groups.reset(first_seed))
            prove(policy, config.max_context)
        temperatures = {"": config.val_temperature} | ({", greedy": 0.0} if greedy else {})
        played = {}
        with distributed.progress_bar(f"evaluation on {groups.split}: tokens sampled") as progress:
            for how, temperature in temperatures.items():
                policy.begin_rollout()
                rules = rules_of(config).held_out(temperature)
                played[f"{name}{how}"] = collect(policy, frame, groups, first_seed, rules, progress)
        return played

    return play
