# SPDX-License-Identifier: Apache-2.0
"""What the measurements of a run share: the file, memory, devices, fio, and a peer where the caller has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from kvdisk.cli.bench import fio
from kvdisk.cli.bench.cases import Case, Contender, Group, Role, Unmeasured
from kvdisk.cli.bench.drive import AUTO_BYTES, DriveRun, try_device
from kvdisk.cli.bench.scratch import Scratch, scratch
from kvdisk.device.base import Buffer
from kvdisk.geometry import round_up
from kvdisk.worker.arena import Arena

_MEMORY_UNIT_BYTES = 1 << 20


class Peer(Protocol):
    """Another program's way from memory to the drive and back, measured beside ours."""

    @property
    def name(self) -> str:
        """As the tables call it."""

    def contenders(
        self, case: Case, directory: Path, memory: Buffer, direct: bool, stack: ExitStack
    ) -> Sequence[Contender]:
        """Return its contenders in a case, such as one for each number of threads; none where it cannot do it.

        ``directory``: its own, not made yet; what is in there is removed at the end of the run. The case's bytes may
        take space there once, which is given back when ``stack`` ends at the latest.
        """


class Stand:
    """One run's equipment. ``skipped``: a line for each thing that is not measured, and why.

    ``memory``: filled with bytes that do not compress, for the devices' buffers.
    """

    def __init__(self, files: Scratch, arena: Arena, runs: list[DriveRun], peer: Peer | None) -> None:
        self.files = files
        self.memory = arena.memory
        self.runs = runs
        self.peer = peer
        self._folders = 0
        self.skipped: list[str] = []
        self.fio = fio.find(files.file, files.direct)
        self.engines: tuple[str, ...] = ()
        if self.fio is None:
            self.skipped.append(fio.MISSING)
        else:
            found = self.fio.engines()
            self.engines = tuple(name for name, why in found.items() if not why)
            self.skipped += [f"fio with {name}: {why}" for name, why in found.items() if why]

    def drive_group(self, case: Case, *, peer: bool = True) -> Group:
        """Return the contenders of a case on the drive: fio's ways, each device, and the peer if there is one.

        ``peer``: False: without it.
        """

        def make(stack: ExitStack) -> list[Contender]:
            made = [*self.limits(case), *self.ours(case)]
            if peer and self.peer is not None:
                self._folders += 1
                folder = self.files.path / f"peer{self._folders}"
                made += self.peer.contenders(case, folder, self.memory, self.files.direct, stack)
            return made

        return Group(case, make)

    def limits(self, case: Case) -> list[Contender]:
        """Return fio's engines in a case."""
        limit = self.fio
        if limit is None:
            return []
        return [
            Contender(f"fio {engine}", Role.LIMIT, partial(limit.measure, case, engine), in_process=False)
            for engine in self.engines
        ]

    def ours(self, case: Case) -> list[Contender]:
        """Return each device in a case, by the name that says what it really uses."""
        return [Contender(run.device.name, Role.OURS, partial(run.measure, case)) for run in self.runs]


@contextmanager
def make_stand(
    directory: Path, file_bytes: int, names: Sequence[str], peer: Peer | None, under_way_bytes: int = 0
) -> Iterator[Stand]:
    """Make the file and the devices of these names, and remove and close everything at the end.

    ``under_way_bytes``: of the case that has most at once. Raises as ``scratch``; Unmeasured where no device
    can be made. Waits for the disk.
    """
    memory_bytes = round_up(max(under_way_bytes, AUTO_BYTES), _MEMORY_UNIT_BYTES)
    with ExitStack() as stack:
        arena = Arena([_MEMORY_UNIT_BYTES], [memory_bytes // _MEMORY_UNIT_BYTES], pin=False)
        stack.callback(arena.close)
        fill(arena.memory)
        beside_bytes = file_bytes if peer is not None else 0
        files = stack.enter_context(scratch(directory, file_bytes, beside_bytes, arena.memory))
        runs: list[DriveRun] = []
        skipped = []
        for name in names:
            device, why = try_device(name)
            if device is None:
                skipped.append(f"device {name} is left out: {why}")
            else:
                runs.append(DriveRun(device, files.fd, arena.memory))
                stack.callback(runs[-1].close)
        if not runs:
            raise Unmeasured("; ".join(skipped) or "no device was asked for")
        stand = Stand(files, arena, runs, peer)
        stand.skipped += skipped
        if not files.direct:
            stand.skipped.append(
                "the file system refuses O_DIRECT: these are figures of the system's memory, not of a drive."
            )
        yield stand


def fill(memory: Buffer) -> None:
    """Fill memory with bytes that no drive compresses, the same in every run."""
    generator = np.random.default_rng(2)
    for start in range(0, memory.nbytes, _MEMORY_UNIT_BYTES):
        piece = memory[start : start + _MEMORY_UNIT_BYTES]
        piece[:] = generator.bytes(piece.nbytes)
