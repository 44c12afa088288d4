"""The command `minragen train`. It refuses mistyped names, and says what it will do, at once.

    make train ENV=bandit      (the same: python -m minragen train --env bandit --nproc auto)

Only then PyTorch and transformers are loaded, which takes seconds. torchrun starts
`python -m minragen.train`, which says the same later.

Reading order: `train`, `processes`, `launch`.

Tests: `python -m pytest tests/test_command.py`.
"""

import logging
import os
import pkgutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from minragen import config as settings
from minragen.envs import ELSEWHERE, REGISTRY
from minragen.look.faults import Parser, told

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
    run = partial(pkgutil.resolve_name("minragen.run.start:main"), argv, begun=True)
    return launch(count, run) if count > 1 else run()


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


def launch(count, run):
    """Call run() in `count` processes of this machine and wait for them, as torchrun does. Ends
    with the status of the first one that fails; a process that a signal ended is named."""
    from torch.multiprocessing import ProcessExitedException, start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What they send each other is pickled, so no other machine may connect. Each process sets its
    # own number of threads.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                   "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                   "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
                   "LOCAL_WORLD_SIZE": str(count)}
    # A fork has everything loaded already. CUDA and macOS need fresh processes.
    fork = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    started = start_processes(process, (run,), count, join=False,
                              start_method="fork" if fork else "spawn")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: [
            p.is_alive() and os.kill(p.pid, number) for p in started.processes])
    logging.disable(logging.CRITICAL)  # of torch.multiprocessing, in this process
    try:
        while not started.join(grace_period=10):
            pass
    except ProcessExitedException as error:
        if error.exit_code < 0:
            print(f"error: process {error.error_index} was ended by signal {-error.exit_code}",
                  file=sys.stderr)
        sys.exit(130 if error.exit_code == 130 else 1)


def process(rank, run):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    run()
