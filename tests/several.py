"""Call a function in several processes that work together.

They are forked, as torchrun takes seconds to import torch in each. test_distributed.py also starts
torchrun itself.
"""

import multiprocessing
import os
import pickle
import socket

import torch

from minragen import distributed


def several(number, function):
    """[what function() returned in process 0, in process 1, ...]: None where it ended early."""
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
