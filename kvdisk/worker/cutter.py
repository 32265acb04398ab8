# SPDX-License-Identifier: Apache-2.0
"""How a job is cut into batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from kvdisk.blocks import group_of
from kvdisk.messages import Reason
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import NO_DRIVE, Batch, OpenFile, Route, Staging, Work, route_of


class BatchCutter:
    """Cuts jobs into batches of about ``batch_bytes``.

    A batch through staging takes at most a quarter of it for a load from a drive, and an eighth for
    anything else. The mover's thread calls everything.
    """

    def __init__(self, resources: Resources, batch_bytes: int) -> None:
        self._resources = resources
        # To the nearest, since the header makes slots a little longer than a power of two.
        self._slots = [max(1, round(batch_bytes / size)) for size in resources.geometry.slot_sizes]
        self._memories = resources.memories

    def cut(self, work: Work, files: Mapping[int, OpenFile]) -> list[Batch]:
        """Cut a job into batches, and set ``work.left``; moves without a source fail with ABSENT.

        Where the KV is the same on every rank, what another rank writes to the drive has ended well
        here, unmoved. ``files``: by segment. What lies on several drives is taken from each in
        turn, so that the batches under way read from, or write to, all of them.
        """
        resources, moves = self._resources, work.job.moves
        geometry, direct = resources.geometry, resources.direct
        found: dict[tuple[Route, int, int], list[int]] = {}
        others = 0
        for position, move in enumerate(moves):
            route = route_of(work.job.kind, move)
            if route is None:
                work.failed[position] = Reason.ABSENT
            elif route.shared and not geometry.writes(resources.rank, move.slots[route.shared].segment):
                others += 1
            else:
                group = 0 if len(geometry.groups) == 1 else group_of(move.key)
                if direct is not None and route.staged and route.on_drive and not route.relays:
                    route = direct.route(route, geometry.size_classes[group], move)
                file = files.get(route.file_slot(move).segment) if route.on_drive else None
                drive = NO_DRIVE if file is None else file.drive
                found.setdefault((route, group, drive), []).append(position)
        work.left = len(moves) - len(work.failed) - others
        lanes = [self._cut_lane(work, *lane, positions) for lane, positions in found.items()]
        return [batch for turn in zip_longest(*lanes) for batch in turn if batch is not None]

    def cut_by_host(self, batch: Batch, positions: list[int]) -> list[Batch]:
        """Return batches that load some moves of a direct batch through host memory."""
        return self._cut_lane(batch.work, batch.route.by_host, batch.group, batch.drive, positions)

    def _cut_lane(self, work: Work, route: Route, group: int, drive: int, positions: list[int]) -> list[Batch]:
        """Return batches of one route, group and drive, in the order of their slots."""
        moves, size_class = work.job.moves, self._resources.geometry.size_classes[group]
        count = self._slots[size_class]
        assert route.memory in self._memories, f"a move names a slot of {route.memory}, which is not there"
        memory = self._memories[route.memory]
        of_tier = None if isinstance(route.memory, Staging) else route.memory
        if route.staged:
            assert memory.slot_counts[size_class], "there is no staging for this size of slot"
            share = 4 if route.scatters and route.on_drive else 8
            count = min(count, max(1, memory.slot_counts[size_class] // share))
        order = route.files or route.source or route.target or of_tier
        assert order is not None
        ordered = sorted(positions, key=lambda at: moves[at].slots[order])
        batches = []
        for start in range(0, len(ordered), count):
            batch = Batch(work, route, group, drive, size_class, memory, ordered[start : start + count])
            if of_tier is not None:
                batch.slots = [moves[position].slots[of_tier].index for position in batch.positions]
            batches.append(batch)
        return batches
