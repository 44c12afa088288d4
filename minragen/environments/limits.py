"""How long a step of an environment may take."""

import signal
import threading

STEP_TIME_LIMIT = 60.0  # seconds of a core for a step; a reply's own limits are lower


def within_time_limit(function, *arguments):
    """function(*arguments), or TimeoutError after STEP_TIME_LIMIT seconds. Only the main thread can
    be interrupted."""
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
