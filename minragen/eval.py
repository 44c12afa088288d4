"""Measure runs and models: success with its interval, beside four scripted players.

    python -m minragen.eval --run my-run                     (or: make eval RUN=my-run)
    python -m minragen.eval --run my-run --set large --samples 8
    python -m minragen.eval --run "a b"                      several runs
    python -m minragen.eval --env bandit,lean --model tiny   (or: make eval ENV=bandit,lean)
    python -m minragen.eval --env bandit --api http://localhost:8000/v1 --api-model NAME
    python -m minragen.eval --play sokoban --seed 3          (or: make play ENV=sokoban)
    python -m minragen.eval --run my-run --show --seed 3     (or: make play RUN=my-run)

This is the command. run/measure.py turns runs and models into players, which needs torch; look/ has
the scripted ones (players.py), statistics and tables (evaluate.py) and play.py.
"""

import sys

from minragen.envs import SPLITS
from minragen.look import evaluate
from minragen.look.faults import Parser, told
from minragen.look.play import play
from minragen.support.options import nearest, parse_options


def main(argv=None):
    """Print a table per environment, or play; end with one sentence on an error."""
    args = arguments(argv)
    try:
        for name, least, most in (("seed", 0, 2**62), ("size", 1, 2**16), ("samples", 1, 2**10)):
            if not least <= getattr(args, name) <= most:
                raise ValueError(f"--{name}: got {getattr(args, name)}, expected {least} to "
                                 f"{most}.")
        if args.play is not None:
            play(args.play, args.split, args.seed,
                 parse_options(args.env_arg) | {"layers": args.layer})
        else:
            from minragen.run import measure

            measure.main(args)
    except Exception as problem:
        sys.exit(told(problem))
    except KeyboardInterrupt:
        sys.exit("\nstopped.")


def play_command(argv):
    """`minragen play ENV` or `minragen play --run NAME`, with the options above."""
    of_run = any(word.partition("=")[0] == "--run" for word in argv)
    if not argv or {"-h", "--help"} & {*argv}:
        main(["--help"])
    main(["--show", *argv] if of_run else ["--play", *argv])


def arguments(argv):
    """The parsed options. Exits with a sentence for those that do not go together."""
    parser = Parser(prog="minragen.eval", description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", help="measure runs, folders under runs/")
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
    parser.add_argument("--set", default="",
                        help=f"a generalisation set: {', '.join(evaluate.SETS)}")
    parser.add_argument("--size", type=int, default=256, help="number of instances [256]")
    parser.add_argument("--samples", type=int, default=1, help="episodes of each for pass@k [1]")
    parser.add_argument("--temperature", type=float, help="of the sampling [val_temperature]")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="write results.csv and chats.jsonl (OpenAI's messages) there")
    parser.add_argument("--device", default="", help="cpu, cuda or mps [cuda if there]")
    parser.add_argument("--seed", type=int, default=0,
                        help="--play, --show: the first instance [0]")
    parser.add_argument("--env-arg", action="append", default=[],
                        help="--env, --play: environment option, name=value; may be repeated; "
                             "--run: where its data file is, if it has moved")
    parser.add_argument("--layer", action="append", default=[],
                        help="--env, --play: layer around it, as in training; may be repeated")
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
    mode = "show" if args.show else "run" if args.run else "env" if args.env else "play"
    unused = {"run": ("layer", "seed"), "show": ("layer", "out", "size", "samples"),
              "env": ("seed",), "play": ("set", "temperature", "device", "out", "size", "samples")}
    for name in unused[mode]:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} has no effect with --{mode}")
    return args


if __name__ == "__main__":
    main()
