# SPDX-License-Identifier: Apache-2.0
"""Runs each of several measures in a process of its own, so that one that fails, hangs, or breaks
the GPU's context takes nothing of the others with it."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple

_FORK = multiprocessing.get_context("fork")
_SAY_WHERE = signal.SIGUSR1
_SAY_WHERE_S, _END_S = 1.0, 5.0
_PR_SET_PDEATHSIG = 1


class Failure(NamedTuple):
    """Why a measure did not end well. ``trace``: where."""

    why: str
    trace: str


def first_line(error: BaseException) -> str:
    """Return what an error says, for a table."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def run_here(measure: Callable[[], Iterable[Any]], keep: Callable[[Any], None]) -> Failure | None:
    """Run a measure in this process, and hand what it yields to ``keep``; return why it failed."""
    try:
        for found in measure():
            keep(found)
    except Exception as error:  # whatever it is, the others go on
        return Failure(first_line(error), traceback.format_exc())
    return None


def run_apart(measure: Callable[[], Iterable[Any]], keep: Callable[[Any], None], limit_s: float) -> Failure | None:
    """Do the same in a process of its own, which is killed where it takes longer than ``limit_s``.

    What it had yielded before it failed was kept. The calling process must not have touched CUDA.
    """
    with tempfile.TemporaryFile() as traces:
        receiver, sender = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_be_child, args=(measure, sender, traces), daemon=True)
        child.start()
        sender.close()
        try:
            return _take_in(receiver, child, keep, time.monotonic() + limit_s, traces)
        finally:
            receiver.close()
            _end(child)


def _take_in(
    receiver: Connection, child: Any, keep: Callable[[Any], None], deadline_s: float, traces: IO[bytes]
) -> Failure | None:
    """Keep what a child sends, until it has ended or the time is over."""
    began_s = time.monotonic()
    failure: Failure | None
    while receiver.poll(max(0.0, deadline_s - time.monotonic())):
        try:
            found, failure, more = receiver.recv()
        except (EOFError, OSError):
            child.join(_END_S)
            return Failure(f"its process died, exit code {child.exitcode}", _read(traces))
        if not more:
            ended: Failure | None = failure
            return ended
        keep(found)
    with suppress(ProcessLookupError):
        os.kill(child.pid, _SAY_WHERE)
    child.join(_SAY_WHERE_S)
    return Failure(f"did not end in {time.monotonic() - began_s:.0f} s", _read(traces))


def _end(child: Any) -> None:
    """Let a child end by itself, or kill it; what the kernel holds back is not waited for."""
    child.join(_SAY_WHERE_S if child.exitcode is None else 0)
    if child.exitcode is None:
        child.kill()
        child.join(_END_S)


def _read(traces: IO[bytes]) -> str:
    traces.seek(0)
    return traces.read().decode(errors="replace")


def _be_child(measure: Callable[[], Iterable[Any]], sender: Connection, traces: IO[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else would end one that hangs
    faulthandler.disable()  # enabled again, it takes the signals back from a library that took them
    faulthandler.enable(traces)
    faulthandler.register(_SAY_WHERE, traces)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # its threads do not outlive a fork
    failure = run_here(measure, lambda found: sender.send((found, None, True)))
    sender.send((None, failure, False))
