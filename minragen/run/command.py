"""The command `minragen train`. It refuses mistyped names, and says what it will do, at once.

    make train ENV=bandit      (the same: python -m minragen train --env bandit --nproc auto)

Only then PyTorch and transformers are loaded, which takes seconds. torchrun starts
`python -m minragen.train`, which does the same later.

Tests: `python -m pytest tests/test_command.py`.
"""

import os
import pkgutil
import sys
from pathlib import Path

from minragen import config as settings
from minragen.envs import ELSEWHERE, REGISTRY
from minragen.look.faults import Parser, told

BEGUN = "MINRAGEN_BEGUN"  # set for the processes that this one starts: it has said the first line
MOST = 4  # processes of `--nproc auto`
TINY = ("tiny", "tiny-vlm")  # models that one core trains best


def train(argv):
    """Train in this process, or in several that it starts. Ends with one sentence on an error."""
    parser = Parser(add_help=False)
    parser.add_argument("--nproc", default="1")
    asked, argv = parser.parse_known_args(argv)
    try:
        given = settings.parse(argv)
        resume, show = given.pop("resume"), given.pop("print_config")
        config = settings.unchecked({"model": "tiny", **given})
        for name in settings.env_names(config):
            if ":" not in name and name not in REGISTRY:
                pkgutil.resolve_name(ELSEWHERE)(name)
        count = processes(asked.nproc, config, resume)
    except ValueError as problem:
        sys.exit(told(problem))
    if not show:
        print(first_line(config, resume, count), flush=True)
    if count > 1:
        os.environ[BEGUN] = "1"
        launch = pkgutil.resolve_name("minragen.run.distributed:launch")
        return launch(count, argv)
    return pkgutil.resolve_name("minragen.run.start:main")(argv, begun=True)


def first_line(config, resume, count=1):
    """What a run is, in one line; and in how many processes."""
    what = (f"continues {config.run}" if resume else
            f"{config.env} with {config.algo}, seed {config.seed}")
    return f"minragen  {what}" + f"; {count} processes" * (count > 1)


def processes(asked, config, resume=False):
    """How many processes to start. `auto`: for a new run of a tiny model on idle cores one a core,
    up to MOST; else one, since larger models use all cores, and a machine that tests has others.
    """
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if asked != "auto":
        raise ValueError(f"--nproc: got {asked!r}, expected a number of processes or auto.")
    cores = os.cpu_count() or 1
    gpu = config.device != "cpu" and Path("/dev/nvidiactl").exists()
    busy = "CI" in os.environ or os.getloadavg()[0] > cores / 2
    alone = resume or gpu or busy or config.model not in TINY
    return 1 if alone else min(cores, MOST, config.num_groups)
