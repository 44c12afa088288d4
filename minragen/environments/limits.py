"""How long a step or a request may take, and what tells that a server is gone or memory full."""

import re
import signal
import threading
from concurrent.futures import Future, wait
from pathlib import Path

STEP_TIME_LIMIT = 60.0  # wall-clock seconds of a step that has its own core; inner limits are lower


class ServerGone(RuntimeError):
    """A tool's server does not answer. An environment raises it before it has changed anything, so
    that the reset or step can be tried again."""


def within_time_limit(function, *arguments):
    """function(*arguments); in the main thread TimeoutError after STEP_TIME_LIMIT seconds."""
    def ring(*_):
        raise TimeoutError(f"a step took over {STEP_TIME_LIMIT:g} seconds.")

    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: what it interrupts may swallow the first one.
    signal.setitimer(signal.ITIMER_REAL, STEP_TIME_LIMIT, STEP_TIME_LIMIT)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_time(seconds, function, *arguments):
    """function(*arguments), called in a thread, or TimeoutError after `seconds`.

    Time limits of sockets begin anew with each byte, so a server that drips its headers, or sends
    `100 Continue` for ever, would never end. The thread is then left to itself.
    """
    ended = Future()

    def call():
        try:
            ended.set_result(function(*arguments))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # it does not keep Python from its exit
    if not wait([ended], max(0.01, seconds)).done:
        raise TimeoutError("timed out")
    return ended.result()


def oom_kills():
    """A text that changes whenever Linux kills a process because memory is used up."""
    return re.search(r"\noom_kill \d+|$", Path("/proc/vmstat").read_text("utf-8"))[0]
