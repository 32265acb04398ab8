# SPDX-License-Identifier: Apache-2.0
"""What needs the indexes of a store: where a prompt's hit ends, and the report.

A process of its own answers each question, one at a time: it takes seconds and memory on a large
store, a drive may hold it up, and the page shall go on meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.child import ChildProcess, ParentPipe
from kvdisk.cli.output import as_json_text, why_not
from kvdisk.cli.report.command import draw_report
from kvdisk.cli.why import explain, parse_token_ids
from kvdisk.errors import KvdiskError

ANSWER_S = 120.0
"""How long an answer is awaited."""
STUCK_S = 600.0
"""How long nothing is asked after a process that could not be ended: it waits for a drive."""
NICE = 10


class Answered(NamedTuple):
    """An answer. ``text``: JSON of an answer, or a page; "" where there is none. ``problem``: why
    there is none, in a sentence. ``is_busy``: another question is being answered."""

    text: str
    problem: str = ""
    is_busy: bool = False


class Asker:
    """Asks about the store in these directories. Any thread may call ``ask``."""

    def __init__(self, directories: Sequence[Path], answer_s: float = ANSWER_S) -> None:
        self._directories, self._answer_s = [str(directory) for directory in directories], answer_s
        self._free = threading.Lock()
        self._stuck_until_s = 0.0

    def ask(self, question: Mapping[str, Any]) -> Answered:
        """Return the answer to ``{"what": "why", "tokens": text, "namespace": text, "salt": text}``
        or ``{"what": "report"}``."""
        if not self._free.acquire(blocking=False):
            return Answered("", "Another question is being answered; ask again in a while.", is_busy=True)
        try:
            if time.monotonic() < self._stuck_until_s:
                return Answered("", "The process of an earlier question still waits for a drive.")
            return self._ask(question)
        finally:
            self._free.release()

    def _ask(self, question: Mapping[str, Any]) -> Answered:
        try:
            child = ChildProcess(__name__, *self._directories)
        except OSError as error:
            return Answered("", f"No process could be started ({error.strerror}).")
        try:
            child.pipe.post(dict(question))
            return Answered(*child.pipe.receive(self._answer_s))
        except TimeoutError:
            return Answered("", f"No answer came within {self._answer_s:.0f} s.")
        except EOFError:
            return Answered("", f"The process that was asked has ended: {child.end().how}.")
        finally:
            if child.end().code is None:
                self._stuck_until_s = time.monotonic() + STUCK_S


def main(descriptor: int, parent: int, *directories: str) -> None:
    """Answer one question; the process that ``Asker`` starts."""
    pipe = ParentPipe(descriptor, parent)
    os.nice(NICE)
    pipe.send(answer([Path(directory) for directory in directories], pipe.receive()))


def answer(directories: Sequence[Path], question: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of the answer, or "" and why there is none."""
    try:
        if question["what"] == "report":
            return draw_report(directories)[1], ""
        tokens = parse_token_ids(question["tokens"], "what was pasted")
        return as_json_text(explain(directories, tokens, question["namespace"] or None, question["salt"] or None)), ""
    except KvdiskError as error:
        said = why_not(error, directories)
        return "", said[:1].upper() + said[1:]
