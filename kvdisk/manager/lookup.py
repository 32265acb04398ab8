# SPDX-License-Identifier: Apache-2.0
"""The longest external hit of a request, from what the catalog says of its keys. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import Catalog, Presence

_SPAN = 256
"""Blocks that are looked up at a time: so many too many where a prefix ends."""
_NOWHERE, _COMING = int(Presence.NOWHERE), int(Presence.COMING)
_READY = bytes([Presence.READY])


class Presences(Protocol):
    """Says of blocks whether they can be loaded, or are on their way: a ``Catalog``,
    ``GpuLoads``."""

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the ``Presence`` of each key of a chain as a byte."""


class Hits(NamedTuple):
    """Ends, in tokens, of the longest prefixes: of what can be loaded, and of what can be or is
    being written."""

    ready: int
    coming: int


def first_needed(group: GroupGeometry, local_tokens: int, hit_tokens: int) -> int:
    """Return the position of the first block that a hit of ``hit_tokens`` needs from outside the
    GPU.

    vLLM: a sliding window of w tokens whose next token is at ``hit_tokens`` reads the w - 1 tokens
    before it, and no block is allocated that lies wholly before them
    (``SlidingWindowManager.get_num_skipped_tokens``).
    """
    start = local_tokens
    if group.window_tokens is not None:
        start = max(start, hit_tokens - group.window_tokens + 1)
    return start // group.block_tokens


class Reachable:
    """What can be loaded: what the catalog has, and ``hints``, the keys that neighbours are thought
    to have."""

    def __init__(self, catalog: Catalog, hints: Collection[BlockKey]) -> None:
        self._catalog = catalog
        self._hints = hints

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return each key's ``Presence``; what is hinted at is READY."""
        found = self._catalog.presences(keys)
        if self._hints and found.strip(_READY):
            hinted = bytes(map(self._hints.__contains__, keys)).replace(b"\1", _READY)
            found = bytes(map(max, found, hinted))
        return found


class Lookups:
    """One request's lookups. The last answer is kept while nothing has changed, and its ready
    prefix while no tier has lost anything: what came since is looked for behind it."""

    def __init__(self, group_count: int) -> None:
        self._asked: tuple[int, ...] = ()
        self._hits = Hits(0, 0)
        # By group: the blocks from ``starts`` on, up to ``ends``, were ready when so much had been
        # lost.
        self._starts = [0] * group_count
        self._ends = [0] * group_count
        self._losses = (-1, -1)

    def hits(
        self,
        catalog: Catalog,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        local_tokens: int,
        limit_tokens: int,
        hints: Collection[BlockKey] = frozenset(),
        hint_changes: int = 0,
    ) -> Hits:
        """Return the ends, in tokens, of the longest prefixes; ``local_tokens`` where nothing
        follows it.

        ``keys`` may be longer than at the last call, and is otherwise the same. ``hints``: keys
        that neighbours are thought to have; ``hint_changes`` rises with each change of them. The
        ends are multiples of every group's block size, at most ``limit_tokens``. Full-attention
        groups need every block from ``local_tokens`` on; window groups only those that
        ``first_needed`` names.
        """
        asked = (local_tokens, limit_tokens, catalog.gains, catalog.losses, hint_changes, *map(len, keys))
        if asked == self._asked:
            return self._hits
        losses = (catalog.losses, hint_changes)
        if losses != self._losses:
            self._ends = [0] * len(keys)
            self._losses = losses
        self._asked = asked
        self._hits = self.find(Reachable(catalog, hints), geometry, keys, local_tokens, limit_tokens)
        return self._hits

    def find(
        self,
        catalog: Presences,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        local_tokens: int,
        limit_tokens: int,
    ) -> Hits:
        """As ``hits``, but looks even where nothing has changed."""
        step = geometry.step_tokens
        for group in geometry.groups:
            limit_tokens = min(limit_tokens, len(keys[group.group]) * group.block_tokens)
        ready = coming = limit_tokens // step * step
        windows: list[GroupGeometry] = []
        for group in geometry.groups:
            if coming <= local_tokens:
                break
            if group.window_tokens is not None:
                windows.append(group)
                continue
            first, last = local_tokens // group.block_tokens, coming // group.block_tokens
            if group.volatile_last:  # the block after a hit must be there: then the hit's last one was not the last
                last = min(last + 1, len(keys[group.group]))
            ends = self._extend(catalog, group.group, keys[group.group], first, last)
            ready = min(ready, (ends[0] - group.volatile_last) * group.block_tokens // step * step)
            coming = min(coming, (ends[1] - group.volatile_last) * group.block_tokens // step * step)
        if coming <= local_tokens:
            return Hits(local_tokens, local_tokens)
        if not windows:
            return Hits(max(local_tokens, ready), coming)
        found = [_Window(catalog, group, keys[group.group], local_tokens, coming) for group in windows]
        return Hits(
            _shorten(found, local_tokens, ready, step, Presence.READY),
            _shorten(found, local_tokens, coming, step, Presence.COMING),
        )

    def _extend(
        self, catalog: Presences, group: int, keys: Sequence[BlockKey], first: int, last: int
    ) -> tuple[int, int]:
        """Return up to where, at most ``last``, a full-attention group's blocks from ``first`` on
        are ready, or coming.

        Looks from where they were ready the last time.
        """
        if not self._starts[group] <= first <= self._ends[group]:
            self._starts[group] = self._ends[group] = first
        position = min(self._ends[group], last)
        ready, is_ready = position, True
        while position < last:
            span = catalog.presences(keys[position : min(position + _SPAN, last)])
            if is_ready:
                count = len(span) - len(span.lstrip(_READY))
                ready += count
                is_ready = count == len(span)
            hole = span.find(_NOWHERE)
            if hole >= 0:
                position += hole
                break
            position += len(span)
        self._ends[group] = max(self._ends[group], ready)
        return ready, position


def longest_hit(
    catalog: Presences,
    geometry: Geometry,
    keys: Sequence[Sequence[BlockKey]],
    local_tokens: int,
    limit_tokens: int,
    *,
    coming: bool,
) -> int:
    """Return one of the ends that ``Lookups.hits`` finds, where nothing is remembered."""
    hits = Lookups(len(keys)).find(catalog, geometry, keys, local_tokens, limit_tokens)
    return hits.coming if coming else hits.ready


class _Window:
    """The blocks of a window group up to ``end_tokens``; those that are local count as there."""

    def __init__(
        self, catalog: Presences, group: GroupGeometry, keys: Sequence[BlockKey], local_tokens: int, end_tokens: int
    ) -> None:
        local, end = local_tokens // group.block_tokens, end_tokens // group.block_tokens
        self.group = group
        self._presences = _READY * local + catalog.presences(keys[local:end])

    def hole(self, first: int, last: int, least: Presence) -> int:
        """Return the last position in ``first`` to ``last`` whose block is farther than ``least``,
        or -1."""
        hole = self._presences.rfind(_NOWHERE, first, last)
        return max(hole, self._presences.rfind(_COMING, first, last)) if least is Presence.READY else hole


def _shorten(windows: Sequence[_Window], local_tokens: int, end: int, step: int, least: Presence) -> int:
    """Return the longest end, at most ``end``, at which each window group has the blocks that it
    needs there."""
    while end > local_tokens:
        for window in windows:
            tokens = window.group.block_tokens
            hole = window.hole(first_needed(window.group, local_tokens, end), end // tokens, least)
            if hole >= 0:
                # Any end between needs that block too.
                end = hole * tokens // step * step
                break
        else:
            return end
    return local_tokens
