"""The commands `minragen train` and `minragen play`. The first refuses mistyped names, and prints
its first line, before PyTorch and transformers are loaded, which takes seconds.

    make train ENV=bandit      (the same: python -m minragen train --env bandit --nproc auto)
    make play ENV=bandit       (the same: python -m minragen play bandit)

Tests: `python -m pytest tests/test_command.py tests/test_eval.py`.
"""

import logging
import os
import pkgutil
import signal
import socket
import sys
from functools import partial

from minragen import config as settings
from minragen.envs import ELSEWHERE, REGISTRY
from minragen.look.faults import Console, Parser, told
from minragen.support.options import parse_options

MOST_PROCESSES = 4  # of `--nproc auto`
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD, and both in WSL


def train(argv):
    """Train in this process, or in several that it starts: `--nproc NUMBER` or `auto`; the other
    options are those of config.py. Ends with one sentence on an error."""
    parser = Parser(add_help=False)
    parser.add_argument("--nproc", default="1")
    asked, argv = parser.parse_known_args(argv)
    try:
        if {"-h", "--help"} & {*argv}:  # importing it registers what --help lists of more/
            pkgutil.resolve_name("minragen.run.start")
        given = settings.parse(argv)
        resume, show = given.pop("resume"), given.pop("print_config")
        config = settings.unchecked({"model": "tiny", **given})
        for name in settings.env_names(config):
            if ":" not in name and name not in REGISTRY:
                pkgutil.resolve_name(ELSEWHERE)(name)
        for text in config.layer:
            pkgutil.resolve_name("minragen.environments.layers:layer_class")(text)
        alone = resume or show or "init_from" in given and "model" not in given
        count = processes(asked.nproc, config, alone)
    except ValueError as problem:
        sys.exit(told(problem))
    if not show:
        print(opening_line(config, resume, count), flush=True)
    run = partial(pkgutil.resolve_name("minragen.run.start:main"), argv, begun=True)
    return launch(count, run) if count > 1 else run()


def opening_line(config, resume, count=1):
    """What a run is, in one line; and in how many processes."""
    what = (f"continues {config.run}" if resume else
            f"{config.env} with {config.algo}, seed {config.seed}")
    return f"minragen  {what}" + f"; {count} processes" * (count > 1)


def processes(asked, config, alone=False):
    """How many processes to start. `auto` is one, but a new run of a bundled tiny model on a CPU
    gets one for each core up to MOST_PROCESSES, unless `alone`, or the variable CI is set."""
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if asked != "auto":
        raise ValueError(f"--nproc: got {asked!r}, expected a number of processes or auto.")
    on_cpu = config.device == "cpu" or not (config.device or any(map(os.path.exists, ACCELERATORS)))
    alone = (alone or config.plain or "CI" in os.environ or not on_cpu
             or config.model not in settings.PRESETS)
    cores = 1 if alone else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES, config.num_groups * config.group_size)


def launch(count, run):
    """Call run() in `count` processes of this machine and wait for them, as torchrun does. If one
    fails, ends with 130 (interrupted) or 1; a process that a signal ended is named."""
    from torch.multiprocessing import ProcessExitedException, start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What they send each other is pickled, so no other machine may connect.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                   "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
                   "LOCAL_WORLD_SIZE": str(count)}
    # A fork has everything loaded already. Accelerators and macOS need fresh processes.
    fork = sys.platform == "linux" and not any(map(os.path.exists, ACCELERATORS))
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
    Console.take_over()  # a spawned process lacks the parent's Console
    run()


def play(argv):
    """Let a person play an environment in the terminal, or a run's policy."""
    from minragen.look import evaluate
    from minragen.look import play as terminal

    parser = Parser(prog="minragen play", description="Play, or watch a run's policy play.")
    parser.add_argument("env", nargs="?", help="you play this environment")
    parser.add_argument("--run", help="the policy of this run, a folder under runs/, plays")
    parser.add_argument("--seed", type=int, default=0, help="the first instance [0]")
    evaluate.add_shared_options(parser)
    args = evaluate.parse(parser, argv or ["--help"], (
        ("checkpoint", "run"), ("set", "run"), ("temperature", "run"), ("device", "run")))
    if (args.env is None) == (args.run is None):
        parser.error("give an environment, or --run NAME")
    if args.run and len(args.run.split()) > 1:
        parser.error("play takes one run")
    if args.run and (args.layer or args.env_arg):
        parser.error("--layer and --env-arg have no effect with --run: a run keeps its own")
    if not 0 <= args.seed <= 2**62:
        parser.error(f"--seed: got {args.seed}, expected 0 to 2**62")
    if args.run is None:
        terminal.play(args.env, args.split, args.seed,
                      parse_options(args.env_arg) | {"layers": args.layer})
    else:
        pkgutil.resolve_name("minragen.run.measure:show")(args)
