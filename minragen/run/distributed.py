"""Several processes train one policy: each plays its share of the episodes and computes its share
of every optimizer step. Trajectories and metrics are gathered on every process.

    make train NPROC=2                                            (one machine)
    torchrun --nproc-per-node=2 -m -- minragen.train --env bandit (docs/performance.md)

All processes hold the whole model and, after each rollout, all trajectories. So filter,
normalisation, advantages and metrics are computed by all alike, as one process would; only
forward and backward passes are divided, and gradients are summed. Process 0 writes.

Tests: `python -m pytest tests/test_distributed.py`.
"""

import os
import re
import sys
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

from minragen.look.faults import told
from minragen.train import World

SELDOM = 30  # seconds between the lines of a bar that is not drawn on a terminal
PATIENCE = timedelta(days=365)  # a slow process is waited for; a dead one closes its connections
SMALL = 2**16  # numbers; smaller gradients are summed together


def begin(device):
    """Join the processes that this one was started with; `device` is a torch.device. Returns
    `print` with `flush=True` in process 0, and in the others a function that prints nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
        here, cuda = int(os.environ["LOCAL_WORLD_SIZE"]), device.type == "cuda"
        if here > 1 and (device.type not in ("cpu", "cuda") or device.index is not None):
            raise ValueError(f"several processes take --device cpu or cuda, got {device}.")
        if cuda and here > torch.cuda.device_count():
            raise ValueError(f"got {here} processes for {torch.cuda.device_count()} GPUs, expected "
                             f"one for each.")
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    return partial(print, flush=True) if rank() == 0 else lambda line: None


def end():
    """Finish together with the other processes."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def fail(error):
    """End this process with a sentence. The launcher ends the others here; those on other machines
    end at their next exchange with this one."""
    if world_size() == 1:  # before `begin` all have the same error, and process 0 prints it
        sys.exit(told(error) if rank() == 0 else 1)
    prefix = f"error in process {rank()}"
    said = (f"{prefix}: another process has ended, so this one ends too"
            if re.search(r"gloo.*(by peer|Broken pipe)", str(error), re.DOTALL)
            else told(error, prefix))
    sys.stdout.flush()
    print(said, file=sys.stderr)
    os._exit(1)  # sys.exit would wait for threads that wait for other processes


@contextmanager
def main_process_first():
    """Process 0 runs the body before the others: it fills the caches that they read."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and world_size() > 1:
        dist.barrier()


def rank():
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def world_size():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def use_cores(one=False):
    """Compute with this process's share of the machine's cores, or with `one`, unless
    OMP_NUM_THREADS says with how many."""
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_initialized() else 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if one else max(1, os.cpu_count() // here))


def world():
    """The World of this process, alone or with others."""
    return Processes() if world_size() > 1 else World()


class Processes(World):
    """Several processes, started by run/command.py or torchrun."""

    def __init__(self):
        self.rank, self.size = rank(), world_size()

    def gather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, x):
        dist.all_reduce(x)
        return x

    def sum_gradients(self, parameters):
        """Small gradients share one all-reduce: each takes about the same time, however little it
        sums. A gradient that no process has stays None."""
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        dist.all_reduce(has)
        summed = [p for p, count in zip(parameters, has.tolist()) if count]
        for p in summed:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        small = [p.grad for p in summed if p.numel() < SMALL]
        waiting = [dist.all_reduce(p.grad, async_op=True) for p in summed if p.numel() >= SMALL]
        if small:
            flat = parameters_to_vector(small)
            dist.all_reduce(flat)
            vector_to_parameters(flat, small)
        for work in waiting:
            work.wait()


@contextmanager
def progress_bar(title, total=None):
    """A context manager. Call its value with the number of things done since, by default 1.

    Process 0 has a bar on stderr. Where that is no terminal, it is drawn once in SELDOM seconds.
    """
    pause = 0.1 if sys.stderr.isatty() else SELDOM
    with tqdm(desc=title, total=total, unit="", leave=False, disable=rank() > 0, delay=pause,
              mininterval=pause) as bar:
        yield bar.update
