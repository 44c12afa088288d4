"""The environments of a run: built from its Config; no failure of one ends the run.

Reading order: `env_groups` (the one place that builds an EnvGroups), `collect`,
`check_environments`, `PatientGroups` (what guards against environments that raise, wait, hang or
break the contract).

Tests: `python -m pytest tests/test_envs.py tests/test_config.py`.
"""

import contextlib
import functools
import math
import os
import pkgutil
import re
import threading
import time
import weakref
from queue import Empty, SimpleQueue

import numpy as np

from minragen import rollout
from minragen.config import BUDGETS, env_names, preset_of
from minragen.environments import limits
from minragen.environments.limits import ServerGone
from minragen.envs import IMAGE, EnvGroups, Observation, image_of, make
from minragen.look.faults import failure_of
from minragen.support.formats import FORMATS, description_parts, format_parts
from minragen.support.options import parse_options

SERVER_PAUSES = (5, 10, 20, 40, 80, 160)  # seconds between tries to reach a tool's server
LARGEST = 1e15  # largest accepted reward or metric of a step; its square fits float32
# Names kept for a run's own metrics (docs/metrics.md): no environment or metric of one has them.
RUN_METRICS = """val test first_turn trajectory gradient step pass@G episode_return reward_std
    groups_kept groups_zero_std rollouts turns response_tokens reply_tokens context_full env_errors
    entropy overlong_penalty grounding worldmodeling env_return policy_loss clip_fraction
    approx_kl kl_ref kl_reward echo_loss grad_norm critic_grad_norm updates_skipped
    logprob_gap regime value_loss explained_variance seconds rollout_seconds rollout_idle waited
    tokens_per_second elapsed valid_thinking distinct_3""".split()  # noqa: SIM905


def env_groups(config, split, num_groups=None, group_size=1, spec="", share=slice(None),
               paid=False):
    """The run's EnvGroups: one group an environment, or `num_groups` split evenly, or as `spec`
    (a mixture, as in --env) says. paid: with training's rewards (--description-reward, --reward)
    """
    names = env_names(config)
    budgets = {n: getattr(config, n) for n in BUDGETS if getattr(config, n)}
    groups = PatientGroups(spec or ",".join(names), num_groups or len(names), group_size, split,
                           parse_options(config.env_arg), budgets, share, config.layer)
    groups.threads = not config.plain
    if description_parts(config.response_format):
        from minragen.more.described import DescribedTurn

        weight = config.description_reward if paid else 0.0
        groups.turn = DescribedTurn(format_parts(config.response_format), weight, groups.turn)
    if paid and config.reward == "success":
        groups.turn = functools.partial(paid_for_success, groups.turn)
    return groups


def paid_for_success(turn, env, reply):
    """A turn of EnvGroups whose reward is 1 if it reached success and 0 otherwise."""
    observation, _, terminated, truncated, info = turn(env, reply)
    return observation, float(info.get("success", 0) > 0), terminated, truncated, info


def collect(policy, frame, groups, first_seed, rules, progress=lambda tokens: None):
    """`rollout.collect`, or fast/scheduler.py's where rows would idle: environments are slow, or
    with more than `max_rows` episodes the next can begin before all of the first have ended."""
    waits = (rules.feed_share < 1 or len(groups) > rules.max_rows
             or any(env.parallel for env in groups.envs))
    play = pkgutil.resolve_name("minragen.fast.scheduler:collect") if waits else rollout.collect
    return play(policy, frame, groups, first_seed, rules, progress)


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
                                 f"text; your class must set self.state in reset() and step().")
    if config.description_reward:
        if not description_parts(config.response_format):
            fitting = " or ".join(f for f in FORMATS if description_parts(f))
            raise ValueError(f"description_reward: the format {config.response_format} asks for "
                             f"no description. Use --response-format {fitting}.")
        groups.reset(0)
        for name, env in zip(groups.names, groups.envs):
            if env.score_description("") is None:
                raise ValueError(f"description_reward: {name} cannot grade a description. Leave "
                                 f"it 0.")
    return groups


def shows_images(groups):
    """Whether the first observation of an environment has an image."""
    return any(image_of(observation) is not None for observation in groups.reset(0))


def most_turns(groups):
    """Turns of the longest episode."""
    return max(env.budget.max_turns for env in groups.envs)


class PatientGroups(EnvGroups):
    """EnvGroups that steps `parallel` environments in threads, if `threads` is True, and returns a
    Failure for each reset or step that raised. The next reset builds such an environment anew.

    A reset or step that hangs is a Failure after STEP_TIME_LIMIT; in threads after STEP_TIME_LIMIT
    * ceil(threads / cores), for all alike. If a tool's server is gone, the rows that need it try
    again after growing pauses, and all wait.

    raises: ServerGone, from `reset`, `step` and `receive`, if a tool's server did not come back
    """

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.threads, self._sent = True, _Calls(self)
        self._broken = set()  # rows whose environments are built anew by the next reset

    def name_of(self, row):
        return metric_name(super().name_of(row))

    def reset(self, first_seed):
        self._broken |= self._sent.running.keys()  # of a rollout that was interrupted
        self._sent = _Calls(self)
        return super().reset(first_seed)

    def begin(self, row):
        if row in self._broken:
            self.envs[row] = make(**self._given[self.names[self.places[row][0]]])
            self._broken.remove(row)
        return super().begin(row)

    @classmethod
    def turn(cls, env, reply):
        """As in EnvGroups, in plain values: Observation, float, bool, bool, {str: float}. Raises
        ValueError if env.step breaks the contract."""
        result = env.step(reply.answer)
        try:
            shown, reward, terminated, truncated, info = result
            return (cls.observed(env, shown), number(reward), bool(number(terminated)),
                    bool(number(truncated)),
                    {metric_name(name): number(x) for name, x in dict.items(info)})
        except (TypeError, ValueError) as problem:
            said = f"{type(env).__name__}.step() returned {result!r:.200}: {problem}"
            raise ValueError(said) from problem

    @staticmethod
    def observed(env, observation):
        """As in EnvGroups. Raises TypeError for what is no text, ValueError for a bad image."""
        text, state = str.__str__(observation), str.__str__(env.state)
        shown = Observation(text, image_of(observation), state)
        if (image := shown.image) is not None and (
                (image.dtype, image.shape[2:], shown.count(IMAGE)) != (np.uint8, (3,), 1)
                or not image.size):
            raise ValueError(f"an image is {image.dtype} of shape {image.shape}, and its text has "
                             f"{shown.count(IMAGE)} times {IMAGE}: expected uint8 of shape "
                             f"(H, W, 3), and once.")
        return shown

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

    def each(self, rows, function):
        """What function(row) returned for each row, or its Failure."""
        calls = _Calls(self)  # its own: several threads may step rows of theirs (more/api.py)
        calls.begin(rows, function)
        try:
            results = calls.patiently(dict.fromkeys(rows, function), {})
        finally:  # what an interrupt leaves running
            self._broken |= calls.running.keys()
        return [results[row] for row in rows]

    def attempt(self, row, function, *arguments):
        """function(*arguments), or a Failure, which ends the row's episode and not the run. (Any
        BaseException: a Rust panic is no Exception.) Ctrl-C reaches only the main thread."""
        try:
            return function(*arguments)
        except BaseException as error:
            if (type(error) is KeyboardInterrupt
                    and threading.current_thread() is threading.main_thread()):
                raise
            self._broken.add(row)
            return failure_of(error)


def number(x):
    """The float of a number. Raises ValueError for nan, an array, or what is no number."""
    if type(x) is not float and hasattr(x, "__float__") and not getattr(x, "ndim", 0):
        x = float(x)
    if type(x) is not float or not -LARGEST < x < LARGEST:
        raise ValueError(f"{x!r:.50} is not a number below {LARGEST:g}.")
    return x


@functools.lru_cache(2**12)
def metric_name(name):
    """The name of an environment or its metric in a run's metrics: its own, or, with a warning,
    another if that is one of RUN_METRICS or has a character that no metric's name may have."""
    name = str.__str__(name)
    if name.partition("/")[0] not in RUN_METRICS and re.fullmatch(r"[\w ./:@%+-]{1,99}", name):
        return name
    other = "env." + re.sub(r"[^\w .:@%+-]", "_", name)[:90]
    print(f"warning   the run uses the metric's name {name!a:.99}, or it has a forbidden "
          f"character, so it is logged as {other!a}", flush=True)
    return other


class _Call(threading.Thread):
    """A reset or a step of a row. `start` begins it in a thread of its own, `run` in this one."""

    def __init__(self, row, function, calls):
        super().__init__(daemon=True)  # else Python's exit waits for those that hang
        self.row, self.function, self.calls = row, function, calls
        self.begun, self.limit = time.monotonic(), 0.0  # seconds that it may take

    def run(self):
        self.calls.ended.put((self, self.calls.groups.attempt(
            self.row, limits.within_time_limit, self.function, self.row)))


class _Calls:
    """Resets or steps of an EnvGroups that have begun and whose results were not taken yet."""

    def __init__(self, groups):
        # Else its sessions on a server would end when Python collects cycles, which may be late.
        self.groups = weakref.proxy(groups)
        self.running, self.ended = {}, SimpleQueue()  # {row: _Call}

    def begin(self, rows, function):
        """Call function(row) for each row, in a thread where its environment is parallel."""
        calls = [_Call(row, function, self) for row in rows]
        in_threads = [call for call in calls
                      if self.groups.threads and self.groups.envs[call.row].parallel]
        self.running |= {call.row: call for call in in_threads}
        limit = limits.STEP_TIME_LIMIT * math.ceil(len(self.running) / (os.cpu_count() or 1))
        for call in self.running.values():
            call.limit = max(call.limit, limit)
        for call in in_threads:
            with contextlib.suppress(RuntimeError):  # the system may refuse another thread
                call.start()
        for call in (call for call in calls if call.ident is None):  # not started
            self.running[call.row] = call
            call.run()

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
                call, result = first, failure_of(
                    TimeoutError(f"a step took over {first.limit:g} seconds."))
                self.groups._broken.add(call.row)
            if self.running.get(call.row) is call:  # else its time was over before
                del self.running[call.row]
                results[call.row] = result
        return results

    def patiently(self, sent, results):
        """{row: result} of all rows in sent, {row: function}: those given, and those to come."""
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
