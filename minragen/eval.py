"""Measure runs and models: success with its interval, beside four scripted players.

    python -m minragen.eval --run my-run                     (or: make eval RUN=my-run)
    python -m minragen.eval --run my-run --set large --samples 8
    python -m minragen.eval --run "a b"                      several runs
    python -m minragen.eval --env bandit,lean --model tiny   (or: make eval ENV=bandit,lean)
    python -m minragen.eval --env bandit --api http://localhost:8000/v1 --api-model NAME

This is the command. run/measure.py turns runs and models into players, which needs torch; look/ has
the scripted ones (players.py), and options, statistics and tables (evaluate.py).
"""

import sys

from minragen.look import evaluate
from minragen.look.faults import Parser, told


def main(argv=None):
    """Print a table per environment; end with one sentence on an error."""
    args = arguments(argv)
    try:
        for name, most in (("size", 2**16), ("samples", 2**10)):
            if not 1 <= getattr(args, name) <= most:
                raise ValueError(f"--{name}: got {getattr(args, name)}, expected 1 to {most}.")
        from minragen.run import measure

        measure.main(args)
    except Exception as problem:
        sys.exit(told(problem))
    except KeyboardInterrupt:
        sys.exit("\nstopped.")


def arguments(argv):
    """The parsed options. Exits with a sentence for those that do not go together."""
    parser = Parser(prog="minragen.eval", description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--run", help="measure runs, folders under runs/")
    what.add_argument("--env", help="measure a model that was not trained, in these environments")
    parser.add_argument("--model", default="", help="--env: as in training, with its presets")
    parser.add_argument("--api", default="", metavar="URL",
                        help="--env: ask a model behind an OpenAI-compatible server ...")
    parser.add_argument("--api-model", default="", metavar="NAME", help="... of this name")
    parser.add_argument("--size", type=int, default=256, help="number of instances [256]")
    parser.add_argument("--samples", type=int, default=1, help="episodes of each for pass@k [1]")
    parser.add_argument("--out", default="", metavar="FOLDER",
                        help="write results.csv and chats.jsonl (OpenAI's messages) there")
    evaluate.add_shared_options(parser)
    args = evaluate.parse(parser, argv, (("api_model", "api"), ("api", "api_model"), ("api", "env"),
                                         ("model", "env"), ("checkpoint", "run"),
                                         ("layer", "env"), ("env_arg", "env")))
    if (args.run, args.env) == (None, None):
        parser.error("give --run NAME or --env ENV")
    return args


if __name__ == "__main__":
    main()
