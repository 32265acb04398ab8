# SPDX-License-Identifier: Apache-2.0
"""A thread that answers the scheduler's questions about what others have: the neighbours' indexes,
the remote store. Nothing that holds it up holds up a step."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

from kvdisk.errors import start_thread

MOST_QUESTIONS = 256
Question = TypeVar("Question")
Answer = TypeVar("Answer")


class ReaderThread(ABC, Generic[Question, Answer]):
    """The queues of questions and answers, and the thread between them. The scheduler's thread
    calls the public methods, and none of them waits but ``close``.

    ``name``: of the thread, which starts at once: a subclass makes its own state first.
    ``close_s``: how long ``close`` waits for what is under way. The constructor raises NoThread.
    """

    def __init__(self, name: str, close_s: float) -> None:
        self._close_s = close_s
        self._questions: deque[Question] = deque()
        self._answers: deque[Answer] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    def poll(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers = self._answers
        return [answers.popleft() for _ in range(len(answers))] if answers else []

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join(self._close_s)

    def _queue(self, question: Question, begun: int = 0) -> bool:
        """Queue a question; return False where too many are. ``begun``: those that left the queue
        and count still."""
        if len(self._questions) + begun >= MOST_QUESTIONS or self._stopping:
            return False
        self._questions.append(question)
        self._wake.set()
        return True

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._idle_s())
                self._wake.clear()
                self._look()
                while self._questions and not self._stopping:
                    self._begin(self._questions.popleft())
        finally:
            self._end()

    @abstractmethod
    def _idle_s(self) -> float | None:
        """Return how long to wait for a question before the next look; None: as long as it
        takes."""

    @abstractmethod
    def _look(self) -> None:
        """Look how others are, and take what they have answered."""

    @abstractmethod
    def _begin(self, question: Question) -> None:
        """Ask a question. Its answer goes to ``_answers``, now or at a later look."""

    @abstractmethod
    def _end(self) -> None:
        """Release what the thread has used."""
