"""Ctrl-C while modules are imported.

An interrupt that is raised inside an import comes out as something else: NumPy's and PyTorch's C code make ImportError
and SystemError of it, class bodies RuntimeError, and one that falls into a callback of the import system is printed and
lost. So until the modules of a verb are there, which is before it has begun anything that needs an end in order, Ctrl-C
ends the process where it stands.

This module imports little: what is imported before it is not covered.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

TYPE_CHECKING = False  # that of `typing`, which takes longer to import than this module
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def leave_at_once() -> None:
    """From now on Ctrl-C ends this process with one line, whatever it does. For the main thread.

    A process that ignores Ctrl-C (one behind a script's `&`) or has a handler of its own is left as it is.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def leaves_at_once() -> bool:
    """Whether `leave_at_once` is in force."""
    return signal.getsignal(signal.SIGINT) is _leave


def leave_in_order() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if leaves_at_once():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_interrupted(error: BaseException) -> bool:
    """Whether an exception is what became of a KeyboardInterrupt."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # nobody may be reading it
        os.write(2, b"longturn: interrupted\n")
    os._exit(INTERRUPTED)
