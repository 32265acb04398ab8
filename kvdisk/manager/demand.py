# SPDX-License-Identifier: Apache-2.0
"""Which blocks requests come to, told once to the history and to who admits. Scheduler thread
only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import STATES, ReuseHistory, Visit

MOST_COUNTED = 512
"""Blocks of long prompts that a step counts ahead of what it needs."""
MOST_LATE = 4096
"""Blocks of long loads that a step counts. The step looks at as many afterwards: these have their
class by then."""


@dataclass(slots=True)
class _Stretch:
    """Blocks of a request that are counted later than those behind them, from ``start`` on."""

    request: RequestState
    group: int
    start: int
    stop: int
    origin: int
    visit: Visit


class Demand:
    """Counts which blocks requests come to: each once for each request, in the order of its
    prompt.

    Of a long prompt each step counts a part, as if all had been counted at once; also once the
    request has ended.
    """

    def __init__(self, history: ReuseHistory, admissions: Sequence[AdmissionPolicy]) -> None:
        self._history = history
        self._admissions = [each for each in admissions if type(each).want is not AdmissionPolicy.want]
        """Those that are told: others' ``want`` does nothing."""
        self._uncounted: dict[tuple[RequestState, int], None] = {}
        """Requests, with a group, whose prompts are not counted to their end, the earliest
        first."""
        self._put_off: deque[_Stretch] = deque()

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
        end, _ = self._visit(request, group, stop)
        is_short = end - start <= MOST_COUNTED // len(request.keys)
        self._count(request, group, end if is_short else stop)

    def _visit(self, request: RequestState, group: int, stop: int) -> tuple[int, Visit]:
        """Return the visit of a request to its blocks up to ``stop``, and to where it goes."""
        visit, start = request.visits[group], request.counted[group]
        if visit is None or stop > visit[0]:
            prompt_blocks = request.first_prompt_tokens // request.geometry.groups[group].block_tokens
            end = max(stop, min(prompt_blocks, len(request.keys[group])))
            visit = request.visits[group] = (end, self._history.begin(start, end))
        return visit

    def put_off(self, request: RequestState, group: int, stop: int) -> None:
        """A request has come to its first ``stop`` blocks of a group, which is not one of recurrent
        states, by a load: what it computes behind them is counted first, and these by later
        steps."""
        start = request.counted[group]
        if start >= stop:
            return
        end, times = self._visit(request, group, stop)
        self._put_off.append(_Stretch(request, group, start, stop, request.origin[group], times))
        request.counted[group] = stop
        request.origin[group] = self._history.origin_behind(request.keys[group][stop - 1])
        if stop == end:
            self._uncounted.pop((request, group), None)

    def _count(self, request: RequestState, group: int, stop: int) -> None:
        """Count a request's blocks up to ``stop``, or to the end of its visit."""
        keys, visit, start = request.keys[group], request.visits[group], request.counted[group]
        assert visit is not None
        end, times = visit
        if any(late.request is request and late.group == group for late in self._put_off):
            # Nothing has more uses than what it follows, which has not its last one yet.
            times = times._replace(most=max(1, self._history.known(keys[start - 1])[0]))
        stop = request.counted[group] = min(stop, end)
        request.origin[group] = self._history.count(keys, start, stop, request.origin[group], times)
        self._want(request, keys, start, stop)
        if stop < end:
            self._uncounted[request, group] = None
        else:
            self._uncounted.pop((request, group), None)

    def step(self) -> None:
        """Count a part of what is not counted yet."""
        left = MOST_LATE
        while left > 0 and self._put_off:
            late = self._put_off[0]
            start, late.start = late.start, min(late.stop, late.start + left)
            keys = late.request.keys[late.group]
            late.origin = self._history.count(keys, start, late.start, late.origin, late.visit)
            self._want(late.request, keys, start, late.start)
            left -= late.start - start
            if late.start == late.stop:
                self._put_off.popleft()
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
        self._put_off = deque(late for late in self._put_off if late.request is not request)

    def clear(self) -> None:
        """The history is forgotten."""
        self._uncounted.clear()
        self._put_off.clear()

    def leave_state(self, request: RequestState, key: BlockKey) -> None:
        """A request leaves a recurrent state; the first that does wants it, too."""
        if not self._history.known(key)[0]:
            self._want_state(request, key)

    def _want_state(self, request: RequestState, key: BlockKey) -> None:
        self._history.count((key,), 0, 1, STATES)
        self._want(request, (key,), 0, 1)

    def _want(self, request: RequestState, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        for admission in self._admissions:
            admission.want(keys[start:stop], request.request_id)
