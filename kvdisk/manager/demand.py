# SPDX-License-Identifier: Apache-2.0
"""Which blocks requests come to, told once to the history and to who admits. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdisk.blocks import BlockKey
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.copies import Offers
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import ReuseHistory, Visit
from kvdisk.manager.step_work import SHARES, Kind, StepWork, Work

_Tell = Callable[[Sequence[BlockKey]], None]


@dataclass(slots=True)
class Stretch:
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
    request has ended. Of blocks by key those that are put count, too: who puts one wants it.
    """

    def __init__(self, history: ReuseHistory, admissions: Sequence[AdmissionPolicy], work: StepWork) -> None:
        self._history = history
        self._admissions = [each for each in admissions if type(each).want is not AdmissionPolicy.want]
        """Those that are told: others' ``want`` does nothing."""
        self._work = work
        self._new: dict[BlockKey, None] = {}
        """See ``bounds.UNREACHED``; the first that came goes first."""
        self._chains: dict[BlockKey, tuple[Visit, int]] = {}
        """See ``bounds.CHAINS``; by the last block, the visit that counted it and the origin of
        what comes behind."""

    # -- what requests come to -----------------------------------------------------------------

    def reach(self, request: RequestState, group: int, stop: int) -> None:
        """A request has come to its first ``stop`` blocks of a group, or will: it wants all of its
        prompt, also those of later steps. Count those that it did not want before: of recurrent
        states the last of its prompt that any request left, which ``states`` takes."""
        start = request.counted[group]
        if start >= stop:
            return
        if group not in self._history.state_groups:
            end, _ = self._visit(request, group, stop)
            is_short = end - start <= SHARES[Kind.DEMAND].blocks // len(request.keys)
            self._count(request, group, end if is_short else stop)
            return
        request.counted[group] = stop
        last = None if start else self._history.last_known(request.keys[group])
        if last is not None:
            request.states.append(last)
            request.came = self._history.count_state(last, request.came)
            self._want(request.request_id, (last,), 0, 1)

    def _visit(self, request: RequestState, group: int, stop: int) -> tuple[int, Visit]:
        """Return the visit of a request to its blocks up to ``stop``, and to where it goes."""
        visit, start = request.visits[group], request.counted[group]
        if visit is None or stop > visit[0]:
            prompt_blocks = request.first_prompt_tokens // request.geometry.groups[group].block_tokens
            end = max(stop, min(prompt_blocks, len(request.keys[group])))
            visit = request.visits[group] = (end, self._history.begin(start, end, before=request.came))
            request.came = visit[1].before
        return visit

    def put_off(self, request: RequestState, group: int, stop: int) -> Stretch | None:
        """A request has come to its first ``stop`` blocks of a group, which is not one of recurrent
        states, by a load: what it computes behind them is counted first. Return what the caller
        counts of them later (``go_on``), part by part; None: they are counted."""
        start = request.counted[group]
        if start >= stop:
            return None
        _, times = self._visit(request, group, stop)
        put_off = Stretch(request, group, start, stop, request.origin[group], times)
        request.counted[group] = stop
        request.origin[group] = self._history.origin_behind(request.keys[group][stop - 1])
        request.put_off[group] = put_off
        return put_off

    def go_on(self, put_off: Stretch, stop: int) -> None:
        """Count what was put off, up to before block ``stop``."""
        request, start = put_off.request, put_off.start
        put_off.start = max(start, min(stop, put_off.stop))
        if start < put_off.start:
            keys = request.keys[put_off.group]
            put_off.origin = self._history.count(keys, start, put_off.start, put_off.origin, put_off.visit)
            self._want(request.request_id, keys, start, put_off.start)
        if put_off.start == put_off.stop and request.put_off[put_off.group] is put_off:
            request.put_off[put_off.group] = None

    def _count(self, request: RequestState, group: int, stop: int) -> None:
        """Count a request's blocks up to ``stop``, or to the end of its visit; steps count the rest
        of that."""
        keys, visit, start = request.keys[group], request.visits[group], request.counted[group]
        assert visit is not None
        end, times = visit
        if request.put_off[group] is not None:
            # Nothing has more uses than what it follows, which has not its last one yet.
            times = times._replace(most=max(1, self._history.known(keys[start - 1])[0]))
        stop = request.counted[group] = min(stop, end)
        request.origin[group] = self._history.count(keys, start, stop, request.origin[group], times)
        self._want(request.request_id, keys, start, stop)
        if stop < end and not self._work.has(Kind.DEMAND, (request, group)):
            self._work.add(Kind.DEMAND, (request, group), self._count_rest(request, group))

    def _count_rest(self, request: RequestState, group: int) -> Work:
        """Count a request's blocks to the end of its visit, as far as steps that compute them have
        not."""
        while (visit := request.visits[group]) is not None and request.counted[group] < visit[0]:
            before = request.counted[group]
            self._count(request, group, before + self._work.left(Kind.DEMAND))
            yield request.counted[group] - before

    def forget(self, request: RequestState) -> None:
        """Do no more of what was begun: it has other keys."""
        for group in range(len(request.keys)):
            self._work.cancel((request, group))

    def leave_state(self, request: RequestState, key: BlockKey) -> None:
        """A request leaves a recurrent state; the first that does wants it, too."""
        if not self._history.known(key)[0]:
            request.came = self._history.count_state(key, request.came)
            self._want(request.request_id, (key,), 0, 1)

    def _want(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        for admission in self._admissions:
            admission.want(keys[start:stop], request_id)

    # -- blocks by key -------------------------------------------------------------------------

    def reach_keys(self, request_id: str, keys_by_group: Sequence[Sequence[BlockKey]], tell: _Tell) -> None:
        """A request wants these blocks of its prompt, in this order. Those that were counted as new
        when they were put are not counted again; of recurrent states the last known one is wanted.
        ``tell``: is told whose count has risen."""
        came = None
        for group, alike in enumerate(keys_by_group):
            uncounted = [key for key in alike if key not in self._new]
            for key in alike if len(uncounted) < len(alike) else ():
                self._new.pop(key, None)
                self._chains.pop(key, None)
            if group in self._history.state_groups:
                last = self._history.last_known(uncounted)
                if last is not None:
                    came = self._history.count_state(last, came)
                    tell((last,))
            elif uncounted:
                visit = self._history.begin(0, len(uncounted), before=came)
                came = visit.before
                self._work.add(Kind.DEMAND, self, self._count_keys(uncounted, visit, tell))
            self._want(request_id, uncounted, 0, len(uncounted))

    @property
    def has_counted_all(self) -> bool:
        """Whether all that requests reached is counted."""
        return not self._work.has(Kind.DEMAND)

    def _count_keys(self, keys: Sequence[BlockKey], visit: Visit, tell: _Tell) -> Work:
        """Count blocks of one kind that a request reached."""
        start = origin = 0
        while start < len(keys):
            stop = min(len(keys), start + self._work.left(Kind.DEMAND))
            origin = self._history.count(keys, start, stop, origin, visit)
            tell(keys[start:stop])
            looked, start = stop - start, stop
            yield looked

    def put(self, offers: Offers) -> None:
        """Count those blocks as new that no request was said to have reached: admission would take
        them for some that nobody has wanted for long."""
        self._work.finish(Kind.DEMAND)
        known, parents = self._history.known, dict(zip(offers.keys, offers.parents, strict=True))
        new = [(group, key) for group, key in zip(offers.groups, offers.keys, strict=True) if not known(key)[0]]
        came = None
        for group in sorted({group for group, _ in new}):
            keys = [key for other, key in new if other == group]
            if group in self._history.state_groups:
                for key in keys:
                    came = self._history.count_state(key, came)
            else:
                came = self._count_chain(keys, parents[keys[0]], came)
        self._new.update((key, None) for _, key in new)
        for most, counted in ((bounds.UNREACHED, self._new), (bounds.CHAINS, self._chains)):
            while len(counted) > most:
                del counted[next(iter(counted))]

    def _count_chain(self, keys: Sequence[BlockKey], parent: BlockKey | None, came: int | None) -> int:
        """Count blocks of one kind that follow each other; return when their request came. A prompt
        that is put in parts is one visit; the next turn of a conversation is another."""
        begun = self._chains.pop(parent, None) if parent is not None else None
        if begun is not None:
            visit, origin = self._history.go_on(begun[0], len(keys)), begun[1]
        else:
            visit = self._history.begin(0, len(keys), before=came)
            origin = self._history.origin_behind(parent) if parent is not None else 0
        self._chains[keys[-1]] = visit, self._history.count(keys, 0, len(keys), origin, visit)
        return visit.before

    def forget_keys(self) -> None:
        """Forget what was put: keys have another meaning."""
        self._new.clear()
        self._chains.clear()
