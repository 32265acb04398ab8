# SPDX-License-Identifier: Apache-2.0
"""Which blocks requests come to, told once to the history and to who admits. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import STATES, ReuseHistory

MOST_COUNTED = 512
"""Blocks of long prompts that a step counts ahead of what it needs."""


class Demand:
    """Counts which blocks requests come to: each once for each request, in the order of its
    prompt.

    Of a long prompt each step counts a part, as if all had been counted at once; also once the
    request has ended.
    """

    def __init__(self, history: ReuseHistory, admissions: Sequence[AdmissionPolicy]) -> None:
        self._history = history
        self._admissions = admissions
        self._uncounted: dict[tuple[RequestState, int], None] = {}
        """Requests, with a group, whose prompts are not counted to their end, the earliest
        first."""

    def reach(self, request: RequestState, group: int, stop: int) -> None:
        """A request has come to its first ``stop`` blocks of a group, or will: it wants all of its
        prompt, also those of later steps. Count those that it did not want before: of recurrent
        states the last of its prompt that any request left, which ``states`` takes."""
        start = request.counted[group]
        if start >= stop:
            return
        keys = request.keys[group]
        if group in self._history.state_groups:
            request.counted[group] = stop
            last = None if start else self._history.last_known(keys)
            if last is not None:
                self._want_state(request, last)
                request.states.append(last)
            return
        visit = request.visits[group]
        if visit is None or stop > visit[0]:
            prompt_blocks = request.first_prompt_tokens // request.geometry.groups[group].block_tokens
            end = max(stop, min(prompt_blocks, len(keys)))
            visit = request.visits[group] = (end, self._history.begin(start, end))
        is_short = visit[0] - start <= MOST_COUNTED // len(request.keys)
        self._count(request, group, visit[0] if is_short else stop)

    def _count(self, request: RequestState, group: int, stop: int) -> None:
        """Count a request's blocks up to ``stop``, or to the end of its visit."""
        keys, visit, start = request.keys[group], request.visits[group], request.counted[group]
        assert visit is not None
        end, times = visit
        stop = request.counted[group] = min(stop, end)
        request.kin[group] = self._history.count(keys, start, stop, request.kin[group], times)
        self._want(request, keys[start:stop])
        if stop < end:
            self._uncounted[request, group] = None
        else:
            self._uncounted.pop((request, group), None)

    def step(self) -> None:
        """Count a part of what is not counted yet."""
        left = MOST_COUNTED
        while left > 0 and self._uncounted:
            request, group = next(iter(self._uncounted))
            before = request.counted[group]
            self._count(request, group, before + left)
            left -= request.counted[group] - before

    def forget(self, request: RequestState) -> None:
        """Count no more of what was begun: it has other keys, or what was counted is forgotten."""
        for group in range(len(request.keys)):
            self._uncounted.pop((request, group), None)

    def clear(self) -> None:
        """The history is forgotten."""
        self._uncounted.clear()

    def leave_state(self, request: RequestState, key: BlockKey) -> None:
        """A request leaves a recurrent state; the first that does wants it, too."""
        if not self._history.known(key)[0]:
            self._want_state(request, key)

    def _want_state(self, request: RequestState, key: BlockKey) -> None:
        self._history.count((key,), 0, 1, STATES)
        self._want(request, (key,))

    def _want(self, request: RequestState, keys: Sequence[BlockKey]) -> None:
        for admission in self._admissions:
            admission.want(keys, request.request_id)
