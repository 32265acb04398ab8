# SPDX-License-Identifier: Apache-2.0
"""The longest external hit of a request, from what the catalog says of its keys. Scheduler thread
only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvdisk.blocks import BlockKey, Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import ABSENT, NONE, READY, WRITING, Catalog, TierChoice

_SPAN = 256
"""Blocks that are looked up at a time: so many too many where a prefix ends."""
_READY = bytes([READY])
_WITHOUT_COMING = bytes(ABSENT if presence == WRITING else presence for presence in range(256))


Presences = Callable[[Sequence[BlockKey]], bytes]
"""Returns the ``CopyState`` of each key of a chain as a byte, as ``Catalog.presences``: can it be
loaded, or is it on its way?"""


class Hits(NamedTuple):
    """Ends, in tokens, of the longest prefixes: of what can be loaded, and of what can be or is
    being written."""

    ready: int
    coming: int


def first_needed(group: GroupGeometry, local_tokens: int, hit_tokens: int) -> int:
    """Return the position of the first block that a hit of ``hit_tokens`` needs from outside the
    GPU. There may be none: then it is at the hit's end, or beyond.
    """
    return max(local_tokens, group.first_read(hit_tokens)) // group.block_tokens


def reachable(catalog: Catalog, hints: Collection[BlockKey], tiers: TierChoice = None) -> Presences:
    """Return the presences of what the catalog has in some tiers, and of ``hints``, the keys that
    others are thought to have: those are READY."""
    in_catalog = catalog.presences if tiers is None else partial(catalog.presences, tiers=tiers)
    if not hints:
        return in_catalog

    return lambda keys: _with_hints(in_catalog(keys), keys, hints)


def _with_hints(found: bytes, keys: Sequence[BlockKey], hints: Collection[BlockKey]) -> bytes:
    """Return presences of keys, of which those that are hinted are READY."""
    if not hints or not found.strip(_READY):
        return found
    hinted = bytes(map(hints.__contains__, keys)).replace(b"\1", _READY)
    return bytes(map(max, found, hinted))


class _Reach:
    """What ``reachable`` returns. ``rows``: of the keys that it was asked for last, NONE of those
    that hints alone make READY."""

    def __init__(self, catalog: Catalog, hints: Collection[BlockKey], tiers: TierChoice) -> None:
        self.catalog, self.hints, self.tiers = catalog, hints, tiers
        self.rows: Sequence[int] = ()

    def __call__(self, keys: Sequence[BlockKey]) -> bytes:
        self.rows = rows = self.catalog.rows_by_key(keys)
        found = self.catalog.presences_of(rows, self.tiers)
        if self.hints and found.strip(_READY):
            self.rows = [row if presence == READY else NONE for row, presence in zip(rows, found, strict=True)]
        return _with_hints(found, keys, self.hints)


class _Run:
    """Blocks of a full-attention group, one behind the other, that were ready when they were looked
    at.

    ``start``: the first. ``rows``: of each in the catalog, NONE where a hint alone names it. What
    is still there is told by the rows: to look up the keys of a long prompt takes 50 times as long.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.rows, self._lives = array("i"), array("I")

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.start + len(self.rows)

    def add(self, reach: _Reach, count: int, at: int | None = None) -> None:
        """Take over the first ``count`` blocks that ``reach`` was asked for last, all of which are
        ready; ``at``: before which others; None: behind them."""
        at, rows, lives = len(self.rows) if at is None else at, reach.rows[:count], reach.catalog.lives
        self.rows[at:at] = array("i", rows)
        self._lives[at:at] = array("I", map(lives.__getitem__, rows) if lives else [0] * len(rows))  # NONE has any

    def begin_at(self, start: int, keys: Sequence[BlockKey], reach: _Reach) -> None:
        """Begin at another block: the GPU has lost some of what it had, or got more."""
        if start < self.start and self.rows:
            before = reach(keys[start : self.start])
            if before.strip(_READY):
                self._keep(0, 0)
            else:
                self.add(reach, len(before), 0)
        elif self.rows:
            self._keep(start - self.start, len(self.rows))
        self.start = start

    def check(self, keys: Sequence[BlockKey], reach: _Reach) -> None:
        """End before the first block that is not ready any more."""
        if not self.rows:
            return
        for at in np.flatnonzero(~reach.catalog.are_ready(self.rows, self._lives, reach.tiers)).tolist():
            if keys[self.start + at] not in reach.hints:
                self._keep(0, at)
                return
            self.rows[at] = NONE

    def _keep(self, first: int, stop: int) -> None:
        self.rows, self._lives = self.rows[first:stop], self._lives[first:stop]


class Lookups:
    """One request's lookups. The last answer is kept while nothing has changed, and how far its
    blocks were ready: what was ready is told by its rows where some tier has lost something, and
    what came since is looked for behind that. ``brought``: up to which token loads of others were
    bringing its hit to the GPU; before that, at which ``GpuLoads.changes``, and the hit's tokens
    from where to where."""

    def __init__(self) -> None:
        self._asked: tuple[int, ...] = ()
        self._hits = Hits(0, 0)
        self._held: tuple[int, ...] = ()
        self._runs: dict[int, _Run] = {}
        """By group, the blocks from the local ones on that were ready when ``_held`` was."""
        self.brought: tuple[tuple[int, int, int], int] = ((-1, 0, 0), 0)

    def hits(
        self,
        catalog: Catalog,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        local_tokens: int,
        limit_tokens: int,
        hints: Collection[BlockKey] = frozenset(),
        hint_changes: int = 0,
        tiers: TierChoice = None,
    ) -> Hits:
        """Return the ends, in tokens, of the longest prefixes; ``local_tokens`` where nothing
        follows it.

        ``keys`` may be longer than at the last call, and is otherwise the same. ``hints``: keys
        that others are thought to have, of all sources or of those that can be read now;
        ``hint_changes`` rises with each change of a source. ``tiers``: that count, the same at each
        call; None: all. The ends are multiples of every group's block size, at most
        ``limit_tokens``. Full-attention groups need every block from ``local_tokens`` on; the
        others only those that ``first_needed`` names.
        """
        gains, losses = catalog.changes(tiers)
        hinted = (hint_changes, len(hints))  # the number tells which sources they are of
        asked = (local_tokens, limit_tokens, gains, losses, *hinted, *map(len, keys))
        if asked != self._asked:
            reach = _Reach(catalog, hints, tiers)
            self._check_runs(reach, geometry, keys, (local_tokens, losses, *hinted))
            self._asked = asked
            self._hits = self.find(reach, geometry, keys, local_tokens, limit_tokens, self._runs)
        return self._hits

    def _check_runs(
        self, reach: _Reach, geometry: Geometry, keys: Sequence[Sequence[BlockKey]], held: tuple[int, ...]
    ) -> None:
        """Have the runs begin at the local blocks, and end where something has gone since they were
        held. ``held``: the local tokens, and all that tells of losses."""
        for group in geometry.groups if held != self._held else ():
            if group.reads_all:
                run = self._runs.setdefault(group.group, _Run(0))
                run.begin_at(held[0] // group.block_tokens, keys[group.group], reach)
                run.check(keys[group.group], reach)
        self._held = held

    def look_ahead(
        self,
        catalog: Catalog,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        stop_tokens: int,
        hints: Collection[BlockKey],
        hint_changes: int,
    ) -> bool:
        """Look for the blocks of full-attention groups before ``stop_tokens``, so that ``hits`` of
        what may be loaded from all tiers need not, where nothing is local; return whether all are
        ready."""
        reach = _Reach(catalog, hints, None)
        self._check_runs(reach, geometry, keys, (0, catalog.changes()[1], hint_changes, len(hints)))
        for group in geometry.groups:
            if group.reads_all:
                run, last = self._runs[group.group], min(stop_tokens // group.block_tokens, len(keys[group.group]))
                if _extend(reach, keys[group.group], 0, last, run)[0] < last:
                    return False
        return True

    def arriving(self, catalog: Catalog, tier: Tier, group: int, keys: Sequence[BlockKey], stop: int) -> list[BlockKey]:
        """Return those of a full-attention group's blocks before ``stop``, which were ready at the
        last ``hits``, that may be just coming to a tier as well: few, unless hints name them."""
        run = self._runs[group]
        rows = np.frombuffer(run.rows, np.int32)[: stop - run.start]
        found = np.flatnonzero((rows == NONE) | (catalog.states_of(rows, tier) == WRITING))
        return [keys[run.start + at] for at in found.tolist()]

    def find(
        self,
        presences: Presences,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        local_tokens: int,
        limit_tokens: int,
        runs: Mapping[int, _Run] | None = None,
    ) -> Hits:
        """Return what ``hits`` does, in any ``presences``, but look even where nothing has changed.
        ``runs``: by group what is known to be ready in them, which are a ``_Reach`` then; it grows
        by what is found."""
        step = geometry.alignment_tokens
        for group in geometry.groups:
            limit_tokens = min(limit_tokens, len(keys[group.group]) * group.block_tokens)
        ready = coming = limit_tokens // step * step
        for group in geometry.groups:
            if coming <= local_tokens:
                break
            if not group.reads_all:
                continue
            first, last = local_tokens // group.block_tokens, coming // group.block_tokens
            last = min(last + group.volatile_blocks, len(keys[group.group]))
            run = None if runs is None else runs[group.group]
            ends = _extend(presences, keys[group.group], first, last, run)
            ready = min(ready, (ends[0] - group.volatile_blocks) * group.block_tokens // step * step)
            coming = min(coming, (ends[1] - group.volatile_blocks) * group.block_tokens // step * step)
        windows = [
            _Window(presences, group, keys[group.group], local_tokens, coming)
            for group in (geometry.groups if coming > local_tokens else ())
            if not group.reads_all
        ]
        if not windows:
            return Hits(max(ready, local_tokens), max(coming, local_tokens))
        return Hits(
            _shorten([window.last_unready for window in windows], local_tokens, ready, step),
            _shorten([window.last_absent for window in windows], local_tokens, coming, step),
        )


def _extend(presences: Presences, keys: Sequence[BlockKey], first: int, last: int, run: _Run | None) -> tuple[int, int]:
    """Return up to where, at most ``last``, a full-attention group's blocks from ``first`` on are
    ready, or coming. ``run``: see ``Lookups.find``; it begins at ``first``."""
    ready = position = first if run is None else min(run.end, last)
    is_ready = True
    while position < last:
        span = presences(keys[position : min(position + _SPAN, last)])
        if is_ready:
            count = len(span) - len(span.lstrip(_READY))
            ready += count
            is_ready = count == len(span)
            if run is not None:
                assert isinstance(presences, _Reach)
                run.add(presences, count)
        hole = span.find(ABSENT)
        if hole >= 0:
            position += hole
            break
        position += len(span)
    return ready, position


class _Window:
    """A group that reads a part of the prefix, and the presence of its blocks: those that are local
    count as there. They are looked up from the end on, as far back as it is asked for them: of a
    hit mostly one window's.

    ``stop_tokens``: nobody asks for blocks behind it.
    """

    def __init__(
        self,
        presences: Presences,
        group: GroupGeometry,
        keys: Sequence[BlockKey],
        local_tokens: int,
        stop_tokens: int,
    ) -> None:
        self._presences = presences
        self._group = group
        self._keys = keys
        self._local_tokens = local_tokens
        self._local = local_tokens // group.block_tokens
        self._start = self._stop = stop_tokens // group.block_tokens
        """From where to where blocks were looked up."""
        self._found = b""
        self._loadable = b""
        """The same, where nothing is on its way."""

    def _look(self, start: int) -> None:
        """Look up the blocks from ``start`` on, or from further before."""
        if start < self._start:
            first = max(self._local, min(start, self._start - _SPAN))
            found = self._presences(self._keys[first : self._start])
            self._start = first
            self._found, self._loadable = found + self._found, found.translate(_WITHOUT_COMING) + self._loadable

    def last_absent(self, end_tokens: int) -> int | None:
        """Return the end, in tokens, of the last hits that do not need the last block which a hit
        of ``end_tokens`` needs and that is not there, nor on its way; None: there is none."""
        return self._last_hole(end_tokens, is_ready=False)

    def last_unready(self, end_tokens: int) -> int | None:
        """Return what ``last_absent`` does, for blocks that cannot be loaded now."""
        return self._last_hole(end_tokens, is_ready=True)

    def _last_hole(self, end_tokens: int, *, is_ready: bool) -> int | None:
        first = max(first_needed(self._group, self._local_tokens, end_tokens), self._local)
        self._look(first)
        found = self._loadable if is_ready else self._found
        end = end_tokens // self._group.block_tokens - self._start
        hole = found.rfind(ABSENT, max(0, first - self._start), max(0, end))
        return None if hole < 0 else (hole + self._start) * self._group.block_tokens


def _shorten(holes: Sequence[Callable[[int], int | None]], local_tokens: int, end: int, step: int) -> int:
    """Return the longest end, at most ``end``, at which each window group has the blocks that it
    needs there. ``holes``: of each, where the last that is missing begins, in tokens."""
    while end > local_tokens:
        for last_hole in holes:
            hole = last_hole(end)
            if hole is not None:
                # Any end between needs that block too.
                end = hole // step * step
                break
        else:
            return end
    return local_tokens
