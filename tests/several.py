"""Several processes for the tests: forked, which is quick, or launched as users do."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

from minragen.run import distributed

TESTS = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def several(number, function):
    """[what function() returned in process 0, in process 1, ...]: None where it ended early.

    They have imported everything already, which takes torchrun's processes seconds.
    """
    context, started = multiprocessing.get_context("fork"), []
    port = free_port()
    for rank in range(number):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(rank, number, port, function, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    results = []
    for _, pipe in started:
        try:
            results.append(pickle.loads(pipe.recv_bytes()))
        except EOFError:
            results.append(None)
    for process, _ in started:
        process.join()
    return results


def _work(rank, number, port, function, pipe):
    # tqdm's own lock is shared with the parent, and stays locked if this process dies as it prints.
    tqdm.set_lock(threading.RLock())
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank),
                   "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.begin(torch.device("cpu"))
    pipe.send_bytes(pickle.dumps(function()))
    distributed.end()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Launched:
    """A command in the background, with its output in files."""

    def __init__(self, folder, *command):
        self.output = folder / f"{time.time()}.out"
        self.errors = self.output.with_suffix(".err")
        with open(self.output, "w") as out, open(self.errors, "w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=err, start_new_session=True,
                env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1",
                                  "MINRAGEN_CACHE": str(folder / "cache")})

    def workers(self):
        """Process ids in the order of ranks."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], check=False,
                               capture_output=True).stdout
        return sorted(map(int, found.split()))
