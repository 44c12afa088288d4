"""What a user reads when something fails: one sentence, and whose line of code it was.

A refusal is an exception that this package raised on purpose, with a `raise` of its own: its class
does not tell, since anybody raises ValueError. Its sentence is enough, and so is that of an OSError
(a missing file, a full disk) or a SyntaxError outside of the user's code. For any other exception
the user also gets the last line of their own code (of ours, if none of theirs ran) and the
traceback.

Reading order: `told` (how a command ends), `fault_of`, `failure_of` (what is kept of an exception
that ends one episode), `Parser` (wrong options).
"""

import argparse
import contextlib
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

from minragen.environments.limits import ServerGone
from minragen.support.options import nearest

PACKAGE = str(Path(__file__).parent.parent) + os.sep
LIBRARIES = ("<", sysconfig.get_path("stdlib") + os.sep)  # <: frozen modules, compiled strings
MOST_FRAMES, MOST_CHARACTERS = 40, 20_000  # of a stored traceback
LONGEST = 300  # characters of a message


class Fault(NamedTuple):
    """What a user reads about an exception. `place` and `traceback` are empty for a refusal."""

    sentence: str  # ValueError: 'zzz' is not in list
    place: str = ""  # my_env.py:14 in _act
    traceback: str = ""

    def __str__(self):
        return printable(f"{self.sentence} ({self.place})." if self.place else self.sentence)


class Failure(Exception):
    """What a reset or a step of an environment raised, in words. fault: its Fault"""

    fault = None


def told(error, prefix="error"):
    """The sentence with which a command ends. Prints the traceback, unless errors.txt has it."""
    fault, kept = fault_of(error), getattr(error, "kept_in", None)
    if fault.place and not kept:
        print(fault.traceback, end="", file=sys.stderr)
    return f"{prefix}: {fault}" + (f" The traceback is in {kept}." if kept else "")


def fault_of(error):
    """The Fault of an exception: that of a Failure, if it is one or was raised from one; and what
    can be said, if the exception's own code raises."""
    try:
        if not isinstance(cause := error.__cause__ or error, Failure):
            return _found(error)
        fault, sentence = cause.fault or Fault(str(cause)), first_line(str(error)).rstrip(".")
        return fault if cause is error else fault._replace(sentence=sentence)
    except BaseException:
        return Fault(first_line(words(error)))


def failure_of(error):
    """An exception as a Failure; a ServerGone as a new ServerGone."""
    failure = (ServerGone if issubclass(type(error), ServerGone) else Failure)(words(error))
    failure.fault = fault_of(error)
    return failure


def words(error):
    """`ValueError: zzz`, or that its text cannot be read; of a ServerGone the text alone."""
    try:
        name, said = f"{type(error).__name__}", str.__str__(str(error))
    except BaseException:  # whatever its __str__ raises
        name, said = type.__repr__(type(error)), "its text cannot be read"
    return said if issubclass(type(error), ServerGone) else f"{name}: {said}"


def _found(error):
    """The Fault of an exception. A refusal `from` an exception of the user's code keeps its own
    sentence and has that exception's place."""
    frames = traceback.extract_tb(error.__traceback__)  # the innermost last
    # Not what an operation of ours raises (a missing key, a call of PyTorch), and not a time limit,
    # which interrupts somebody's code. An environment raises ServerGone on purpose.
    refusal = not frames or isinstance(error, ServerGone) or (
        frames[-1].filename.startswith(PACKAGE) and frames[-1].line.startswith("raise ")
        and not isinstance(error, TimeoutError))
    if refusal and error.__cause__ is None:
        return Fault(str(error))
    cause = error.__cause__ if refusal else error
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    theirs = [frame for frame in frames if not frame.filename.startswith((PACKAGE, *LIBRARIES))
              and f"-packages{os.sep}" not in frame.filename]
    if not theirs and (refusal or isinstance(cause, (OSError, SyntaxError))):
        return Fault(str(error))
    frame = (theirs or ours or frames)[-1]
    file = frame.filename.removeprefix(os.getcwd() + os.sep)
    said = str(error) if refusal else f"{type(cause).__name__}: {cause}"
    whole = "".join(traceback.format_exception(error, limit=-MOST_FRAMES))
    return Fault(first_line(said).rstrip(".: "), f"{file}:{frame.lineno} in {frame.name}",
                 printable(whole)[:MOST_CHARACTERS])


def first_line(text):
    return printable(text.partition("\n")[0][:LONGEST])


def printable(text):
    """A text without control codes of a terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


class Console:
    """A text stream that drops what cannot be written: the disk is full, or the terminal has gone.
    If `plain`, a terminal's control codes, which texts from elsewhere may have, become `?`."""

    def __init__(self, stream, plain=True):
        self._stream, self._plain = stream, plain

    def write(self, text):
        if self._plain:
            text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name):
        return getattr(self._stream, name)

    @classmethod
    def take_over(cls):
        """Print through it from here on; letters that the locale lacks become `?`. stderr keeps
        control codes, for progress bars; errors written there went through `printable`."""
        if sys.stdout and not isinstance(sys.stdout, cls):
            sys.stdout.reconfigure(errors="replace")
            sys.stdout, sys.stderr = cls(sys.stdout), sys.stderr and cls(sys.stderr, plain=False)


class Parser(argparse.ArgumentParser):
    """argparse that refuses in one sentence, an unknown option with the nearest known one."""

    def __init__(self, **given):
        super().__init__(allow_abbrev=False, **given)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            self.error(nearest("option", unknown[0].partition("=")[0], known))
        return parsed

    def error(self, said):
        self.exit(2, printable(f"error: {said[0].lower()}{said[1:].rstrip('.')}. See --help.\n"))
