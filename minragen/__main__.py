"""The commands: `minragen NAME`, or in a checkout `python -m minragen NAME`.

    python -m minragen train --env bandit        train an agent; --nproc auto: on up to four cores
    python -m minragen eval --run my-run         success beside scripted players
    python -m minragen report my-run             one page about a run, or about several
    python -m minragen play sokoban              play yourself; with --run NAME a run's policy plays
    python -m minragen reproduce my-run          train a run again, and say where the two differ
    python -m minragen serve --env sokoban       an environment as an OpenEnv server
    python -m minragen environments sokoban 0    the solver's episode

--help after a name lists its options.
"""

import pkgutil
import sys

from minragen.look.faults import Console, Parser, told
from minragen.support.options import nearest

# name -> the function that takes the words after it
COMMANDS = {
    "train": "minragen.run.command:train",
    "eval": "minragen.eval:main",
    "report": "minragen.look.report:main",
    "play": "minragen.run.command:play",
    "reproduce": "minragen.run.reproduce:main",
    "serve": "minragen.look.serve:main",
    "environments": "minragen.look.play:environments"}


def main(argv=None):
    """Run a command. It ends with one sentence on an error."""
    if argv is None:  # from a shell
        Console.take_over()
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        return print((__doc__ or "python -OO leaves out this text.").strip())
    if name not in COMMANDS:
        Parser().error(nearest("command", name, [*COMMANDS]))
    try:
        return pkgutil.resolve_name(COMMANDS[name])(words)
    except Exception as problem:
        sys.exit(told(problem))
    except KeyboardInterrupt:  # while PyTorch is loaded, for example
        sys.exit(130)


if __name__ == "__main__":
    main()
