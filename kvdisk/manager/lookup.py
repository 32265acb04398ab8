# SPDX-License-Identifier: Apache-2.0
"""The longest external hit of a request, from what the catalog says of its keys. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import ABSENT, READY, WRITING, Catalog

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


def reachable(catalog: Catalog, hints: Collection[BlockKey]) -> Presences:
    """Return the presences of what the catalog has, and of ``hints``, the keys that neighbours are
    thought to have: those are READY."""
    if not hints:
        return catalog.presences

    def presences(keys: Sequence[BlockKey]) -> bytes:
        found = catalog.presences(keys)
        if found.strip(_READY):
            hinted = bytes(map(hints.__contains__, keys)).replace(b"\1", _READY)
            found = bytes(map(max, found, hinted))
        return found

    return presences


class Lookups:
    """One request's lookups. The last answer is kept while nothing has changed, and how far its
    blocks were ready while no tier has lost anything: what came since is looked for behind that."""

    def __init__(self) -> None:
        self._asked: tuple[int, ...] = ()
        self._hits = Hits(0, 0)
        self._held: tuple[int, ...] = ()
        self._ends: dict[int, int] = {}
        """By group, up to where the blocks from the local ones on were ready when ``_held``
        was."""

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
        groups need every block from ``local_tokens`` on; the others only those that
        ``first_needed`` names.
        """
        asked = (local_tokens, limit_tokens, catalog.gains, catalog.losses, hint_changes, *map(len, keys))
        if asked != self._asked:
            held = (local_tokens, catalog.losses, hint_changes)
            if held != self._held:
                self._ends, self._held = {}, held
            self._asked = asked
            self._hits = self.find(reachable(catalog, hints), geometry, keys, local_tokens, limit_tokens)
        return self._hits

    def find(
        self,
        presences: Presences,
        geometry: Geometry,
        keys: Sequence[Sequence[BlockKey]],
        local_tokens: int,
        limit_tokens: int,
    ) -> Hits:
        """As ``hits``, but looks even where nothing has changed; of new ``Lookups`` in any
        ``presences``."""
        step = geometry.step_tokens
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
            ends = self._extend(presences, group.group, keys[group.group], first, last)
            ready = min(ready, (ends[0] - group.volatile_blocks) * group.block_tokens // step * step)
            coming = min(coming, (ends[1] - group.volatile_blocks) * group.block_tokens // step * step)
        windows: list[_Window] = []
        for group in geometry.groups if coming > local_tokens else ():
            if not group.reads_all:
                local = local_tokens // group.block_tokens
                rest = presences(keys[group.group][local : coming // group.block_tokens])
                windows.append((group, _READY * local + rest))
        loadable = [(group, found.translate(_WITHOUT_COMING)) for group, found in windows]
        return Hits(
            _shorten(loadable, local_tokens, ready, step),
            _shorten(windows, local_tokens, coming, step),
        )

    def _extend(
        self, presences: Presences, group: int, keys: Sequence[BlockKey], first: int, last: int
    ) -> tuple[int, int]:
        """Return up to where, at most ``last``, a full-attention group's blocks from ``first`` on
        are ready, or coming.

        Looks from where they were ready the last time.
        """
        ready = position = min(self._ends.get(group, first), last)
        is_ready = True
        while position < last:
            span = presences(keys[position : min(position + _SPAN, last)])
            if is_ready:
                count = len(span) - len(span.lstrip(_READY))
                ready += count
                is_ready = count == len(span)
            hole = span.find(ABSENT)
            if hole >= 0:
                position += hole
                break
            position += len(span)
        self._ends[group] = max(self._ends.get(group, first), ready)
        return ready, position


_Window = tuple[GroupGeometry, bytes]
"""A group that reads a part of the prefix, and the presence of each of its blocks: those that are
local count as there."""


def _shorten(windows: Sequence[_Window], local_tokens: int, end: int, step: int) -> int:
    """Return the longest end, at most ``end``, at which each window group has the blocks that it
    needs there."""
    while end > local_tokens:
        for group, presences in windows:
            hole = presences.rfind(ABSENT, first_needed(group, local_tokens, end), end // group.block_tokens)
            if hole >= 0:
                # Any end between needs that block too.
                end = hole * group.block_tokens // step * step
                break
        else:
            return end
    return local_tokens
