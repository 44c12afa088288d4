"""The environments of a run: built from its Config, and patient with those that wait or hang.

Reading order: `env_groups` (the one place that builds an EnvGroups), `check_environments`,
`PatientGroups`.

Tests: `python -m pytest tests/test_envs.py tests/test_config.py`.
"""

import math
import os
import threading
import time
from functools import partial

from minragen.config import BUDGETS, env_names, preset_of
from minragen.environments import limits
from minragen.envs import EnvGroups, ServerGone
from minragen.formats import FORMATS, description_parts, format_parts
from minragen.look.faults import with_fault
from minragen.more.described import DescribedTurn
from minragen.options import parse_options

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
    """EnvGroups of which those that declare `parallel` run in threads.

    A reset or step that hangs raises TimeoutError after STEP_TIME_LIMIT. Threads have one limit
    together: STEP_TIME_LIMIT times the threads per core, rounded up. If a tool's server is gone,
    the rows that need it try again after growing pauses. What an environment raises has its Fault
    as attribute `fault`.

    raises: ServerGone, from `reset` and `step`, if a tool's server did not come back
    """

    def _each(self, rows, function):
        results, pauses = dict(zip(rows, self._together(rows, function))), iter(SERVER_PAUSES)
        while gone := [r for r in rows if isinstance(results[r], ServerGone)]:
            pause = next(pauses, None)
            if pause is None:
                raise results[gone[0]]
            print(f"waiting   {pause} s, then trying again: {results[gone[0]]}", flush=True)
            time.sleep(pause)
            results |= zip(gone, self._together(gone, function))
        return [results[r] for r in rows]

    def _together(self, rows, function):
        """What function(row) returned for each row, or the exception that it raised."""
        results = {}

        def run(row):
            results[row] = self._attempt(row, function, row)

        # Daemons: else Python's exit waits for those that hang.
        threads = [threading.Thread(target=run, args=(row,), daemon=True)
                   for row in rows if self.envs[row].parallel]
        for thread in threads:
            thread.start()
        for row in rows:
            if not self.envs[row].parallel:
                results[row] = self._attempt(row, limits.within_time_limit, function, row)
        limit = limits.STEP_TIME_LIMIT * math.ceil(len(threads) / (os.cpu_count() or 1))
        deadline = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        finished, late = dict(results), TimeoutError(f"a step took over {limit:g} seconds.")
        self._broken |= {*rows} - finished.keys()  # they may still be running
        results = [finished.get(r, late) for r in rows]
        return [with_fault(x) if isinstance(x, Exception) else x for x in results]
