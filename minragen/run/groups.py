"""The environments of a run: built from its Config, and patient with those that wait or hang.

Reading order: `env_groups` (the one place that builds an EnvGroups), `check_environments`,
`PatientGroups`.

Tests: `python -m pytest tests/test_envs.py tests/test_config.py`.
"""

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from minragen.config import BUDGETS, env_names, preset_of
from minragen.environments import limits
from minragen.envs import EnvGroups, ServerGone, failure_of, image_of
from minragen.look.faults import fault_of
from minragen.more.described import DescribedTurn
from minragen.support.formats import FORMATS, description_parts, format_parts
from minragen.support.options import parse_options

# Threads of steps over their limit, which Python cannot end; with so many no other step begins.
MOST_LATE, LATE = 1000, "a step over its limit"  # and the name of such a thread
SERVER_PAUSES = (5, 10, 20, 40, 80, 160)  # seconds between tries to reach a tool's server


def env_groups(config, split, num_groups=None, group_size=1, spec="", share=slice(None),
               paid=False):
    """The run's EnvGroups: one group an environment, or `num_groups` split evenly or by `spec`.

    paid: whether it pays as in training: for descriptions of the state, or for success alone
    """
    names = env_names(config)
    budgets = {n: getattr(config, n) for n in BUDGETS if getattr(config, n)}
    groups = PatientGroups(spec or ",".join(names), num_groups or len(names), group_size, split,
                           parse_options(config.env_arg), budgets, share, config.layer)
    groups.threads = not config.plain
    if description_parts(config.response_format):
        weights = (config.grounding_reward, config.worldmodeling_reward) if paid else (0.0, 0.0)
        groups.turn = DescribedTurn(format_parts(config.response_format), *weights)
    if paid and config.reward == "success":
        groups.turn = partial(paid_for_success, groups.turn)
    return groups


def paid_for_success(turn, env, reply):
    """A turn of EnvGroups whose reward is 1 if it reached success and 0 otherwise."""
    observation, _, terminated, truncated, info = turn(env, reply)
    return observation, float(info.get("success", 0) > 0), terminated, truncated, info


def check_environments(config):
    """Refuse options that the environments of a Config cannot use. Raises ValueError.

    returns: EnvGroups of one row for each of them
    """
    groups = env_groups(config, "val")
    if (config.context != "full" and config.window > most_turns(groups)
            and config.window not in (preset_of(config).window, type(config).window)):
        raise ValueError(f"window: got {config.window}, but it has no effect here. It needs to be "
                         f"no more than an episode's turns.")
    if config.echo_coef and most_turns(groups) == 1:
        raise ValueError(f"echo_coef: got {config.echo_coef}, but it has no effect here. Episodes "
                         f"of one turn have no observation after a reply.")
    if config.echo_coef or config.advantages == "gigpo":
        option = "echo_coef" if config.echo_coef else "advantages gigpo"
        for name, shown in zip(groups.names, groups.reset(0)):
            if config.echo_coef and image_of(shown) is not None:
                raise ValueError(f"echo_coef predicts text, and {name} shows images.")
            if not getattr(shown, "state", ""):
                raise ValueError(f"{option}: {name} shows no state as text. Choose a view with "
                                 f"text; its own reset() and step() must set self.state.")
    paid_for = {"grounding_reward": "observation", "worldmodeling_reward": "prediction"}
    for option, part in paid_for.items():
        if getattr(config, option) == 0:
            continue
        if part not in format_parts(config.response_format):
            fitting = " or ".join(f for f in FORMATS if part in format_parts(f))
            raise ValueError(f"{option}: the format {config.response_format} has no {part}. "
                             f"Use --response-format {fitting}.")
        groups.reset(0)
        for name, env in zip(groups.names, groups.envs):
            if env.score_description("") is None:
                raise ValueError(f"{option}: {name} cannot grade a description. Leave it 0.")
    return groups


def most_turns(groups):
    """Turns of the longest episode."""
    return max(env.budget.max_turns for env in groups.envs)


def backends(groups):
    """External backends of the environments, for the first line of a run's output."""
    return "".join(f"; {name} uses {env.backend}"
                   for name, env in zip(groups.names, groups.envs) if env.backend)


class PatientGroups(EnvGroups):
    """EnvGroups that steps `parallel` environments in threads, if `threads` is True.

    A reset or step that hangs raises TimeoutError after STEP_TIME_LIMIT. All threads share one
    limit: STEP_TIME_LIMIT times the threads per core, rounded up. If a tool's server is gone, the
    rows that need it try again after growing pauses, and all wait. A Failure has its Fault.

    raises: ServerGone, from `reset`, `step` and `receive`, if a tool's server did not come back
    """

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.threads, self._sent = True, _Calls(self)

    def reset(self, first_seed):
        self._broken |= self._sent.running.keys()  # of a rollout that was interrupted
        self._sent = _Calls(self)
        return super().reset(first_seed)

    def send(self, rows, replies):
        """Begin to step rows; `receive` returns the results. `reset` drops those in flight."""
        reply_of = dict(zip(rows, replies))
        self._sent.begin(rows, lambda row: self.turn(self.envs[row], reply_of[row]))

    def receive(self, wait=True):
        """{row: result of `step`} of the rows whose steps have ended since the last call. wait:
        until there is one, if any is in flight."""
        calls = dict(self._sent.running)
        results = self._sent.take(1 if wait else 0)
        if any(isinstance(result, ServerGone) for result in results.values()):
            return self._sent.patiently({row: calls[row].function for row in calls}, results)
        return results

    @staticmethod
    def failure(error):
        failure = failure_of(error)
        failure.fault = fault_of(error)
        return failure

    def _each(self, rows, function):
        calls = _Calls(self)  # its own: several threads may step rows of theirs (more/api.py)
        calls.begin(rows, function)
        try:
            results = calls.patiently(dict.fromkeys(rows, function), {})
        finally:  # what an interrupt leaves running
            self._broken |= calls.running.keys()
        return [results[row] for row in rows]


@dataclass
class _Call:
    """A reset or a step that has begun."""

    row: int
    function: Callable
    begun: float = math.inf
    limit: float = 0.0  # seconds that it may take
    thread: threading.Thread | None = None


class _Calls:
    """Resets or steps of an EnvGroups that have begun and whose results were not taken yet."""

    def __init__(self, groups):
        # Else its sessions on a server would end when Python collects cycles, which may be late.
        self.groups = weakref.proxy(groups)
        self.running, self.ended = {}, SimpleQueue()  # {row: _Call}

    def begin(self, rows, function):
        """Call function(row) for each row, in a thread where its environment is parallel."""
        envs, threads = self.groups.envs, self.groups.threads
        in_threads = [row for row in rows if threads and envs[row].parallel]
        self.running |= {row: _Call(row, function, time.monotonic()) for row in in_threads}
        limit = limits.STEP_TIME_LIMIT * math.ceil(len(self.running) / (os.cpu_count() or 1))
        for call in self.running.values():
            call.limit = max(call.limit, limit)
        late = in_threads and sum(thread.name == LATE for thread in threading.enumerate())
        begun = {row for row in in_threads if self._started(row, late)}
        for row in (row for row in rows if row not in begun):
            self.running[row] = _Call(row, function)
            self._run(self.running[row], limits.within_time_limit, function, row)

    def _started(self, row, late):
        """Whether the row's call has begun in a thread, or failed because too many hang."""
        call = self.running[row]
        if late >= MOST_LATE:
            self.ended.put((call, self.groups.failure(RuntimeError(
                f"{MOST_LATE} steps hang in their threads, so this one did not begin."))))
            return True
        call.thread = threading.Thread(target=self._run, args=(call, call.function, row),
                                       daemon=True)  # else Python's exit waits for those that hang
        with contextlib.suppress(RuntimeError):  # the system may refuse another one
            call.thread.start()
        return call.thread.ident is not None

    def _run(self, call, function, *arguments):
        self.ended.put((call, self.groups.attempt(call.row, function, *arguments)))

    def take(self, least):
        """{row: result} of calls that have ended, once there are `least`. A call past its limit
        ends with TimeoutError, though its thread may go on."""
        results = {}
        while self.running:
            left = None  # seconds to wait; None: a result is there
            if self.ended.empty():
                first = min(self.running.values(), key=lambda call: call.begun + call.limit)
                left = max(0.0, first.begun + first.limit - time.monotonic())
                if left and len(results) >= least:
                    break
            try:
                call, result = self.ended.get(timeout=left)
            except Empty:
                call, result = first, self.groups.failure(
                    TimeoutError(f"a step took over {first.limit:g} seconds."))
                call.thread.name = LATE
                self.groups._broken.add(call.row)
            if self.running.get(call.row) is call:  # else its time was over before
                del self.running[call.row]
                results[call.row] = result
        return results

    def patiently(self, sent, results):
        """The results of all that was sent, {row: function}: the given ones, and those to come."""
        pauses, results = iter(SERVER_PAUSES), results | self.take(len(self.running))
        while gone := [row for row in sent if isinstance(results[row], ServerGone)]:
            if (pause := next(pauses, None)) is None:
                raise results[gone[0]]
            print(f"waiting   {pause} s, then trying again: {results[gone[0]]}", flush=True)
            time.sleep(pause)
            for row in gone:
                self.begin([row], sent[row])
            results |= self.take(len(gone))
        return results
