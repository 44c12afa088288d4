"""The command that serves an environment over OpenEnv (docs/openenv.md).

    python -m minragen serve --env sokoban --port 8000

Tests: `python -m pytest tests/environments/test_openenv.py`.
"""

import socket
import sys
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial

from minragen.environments.openenv import LOOPBACK, MAX_ANSWER, application, uvicorn
from minragen.envs import Budget, image_of, make
from minragen.look.faults import Parser
from minragen.support.options import parse_options


def main(argv):
    """Serve an environment until interrupted."""
    parser = Parser(prog="minragen serve", description="Serve an environment over OpenEnv.")
    parser.add_argument("--env", required=True, help="name or package.module:Class")
    parser.add_argument("--env-arg", action="append", default=[], help="name=value, as in training")
    parser.add_argument("--layer", action="append", default=[], help="as in training")
    for field in fields(Budget):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="as in training")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, choices=range(2**16), metavar="PORT",
                        help="[8000]; 0: a free one")
    given = vars(parser.parse_args(argv))
    build = partial(make, given["env"],
                    **parse_options(given["env_arg"]) | {"layers": given["layer"]})
    build = partial(build, budget=replace(build().budget, **{
        f.name: given[f.name] for f in fields(Budget) if given[f.name] is not None}))
    if image_of(build().reset(seed=0)[0]) is not None:
        raise ValueError("images are not served over OpenEnv: use a view without them.")
    host = f"[{given['host']}]" if ":" in given["host"] else given["host"]
    address = f"http://{host}:{given['port']}"
    try:
        listening = socket.create_server((given["host"], given["port"]), family=(
            socket.AF_INET6 if ":" in host else socket.AF_INET))
    except OSError as problem:
        sys.exit(f"error: cannot listen on {address}: {problem}. Take another --port or --host.")
    app = application(given["env"], build, host in LOOPBACK)
    config = uvicorn.Config(app, log_level="warning", ws_max_size=MAX_ANSWER,
                            timeout_graceful_shutdown=5)
    print(f"{given['env']} at http://{host}:{listening.getsockname()[1]}", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])
    print("stopped")
