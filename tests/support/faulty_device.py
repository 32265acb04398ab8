# SPDX-License-Identifier: Apache-2.0
"""A device that misbehaves on request, around any other."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.device.base import Buffer, Device, Op, Outcome, Transfer
from kvdisk.geometry import ALIGNMENT


@dataclass(slots=True)
class FaultPlan:
    """What shall go wrong; may be changed at any time, and holds from the next ``submit`` on.

    ``fail``: errno by number of the transfer, reads and writes counted together from 1 in order of
    submission. ``corrupt``: by number of the read, counted from 1, the byte of the transfer (modulo
    its length) in which one bit is flipped after it was read. ``full``: every write fails with
    ENOSPC. ``hold``: batches are kept back, not a byte of them moves, until
    ``FaultyDevice.release``. ``hang``: numbers of transfers, as for ``fail``, whose batches are
    kept back until ``FaultyDevice.let_go``, while others go on. ``tear``: likewise numbers of
    transfers, which move their first half and then fail with EIO. ``lose``: likewise, which move
    nothing and are said to have moved all. A transfer that is to fail moves nothing.
    """

    fail: dict[int, int] = field(default_factory=dict)
    corrupt: dict[int, int] = field(default_factory=dict)
    full: bool = False
    hold: bool = False
    hang: set[int] = field(default_factory=set)
    tear: set[int] = field(default_factory=set)
    lose: set[int] = field(default_factory=set)


@dataclass(slots=True)
class HeldBatch:
    """A batch between us and the inner device.

    ``passed``: what is passed on, halves of torn transfers among it. ``positions``: of these in the
    caller's batch. ``errors``: by such a position. ``corrupt``: place in ``passed`` of the reads to
    corrupt, and the byte.
    """

    ticket: int
    op: Op
    passed: list[Transfer] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    errors: dict[int, int] = field(default_factory=dict)
    corrupt: list[tuple[int, int]] = field(default_factory=list)


class FaultyDevice:
    """``Device`` that passes batches on to ``inner``, and breaks them as ``plan`` says; an empty
    plan changes nothing.

    While batches are held or hang, ``poll`` does not wait for them; ``drain`` and ``close`` release
    them first. ``submitted`` lists what was asked for, in order: op and the batch's transfers.
    """

    def __init__(self, inner: Device, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = plan if plan is not None else FaultPlan()
        self.submitted: list[tuple[Op, tuple[tuple[int, int, int], ...]]] = []
        """Each transfer as (fd, offset, bytes)."""
        self._tickets = 0
        self._transfers = 0
        self._reads = 0
        self._held: list[HeldBatch] = []
        self._hanging: list[HeldBatch] = []
        self._passed: dict[int, HeldBatch] = {}
        self._ended: list[Outcome] = []

    @property
    def name(self) -> str:
        """The inner device's name."""
        return f"faulty({self.inner.name})"

    @property
    def held(self) -> int:
        """Number of batches kept back by ``hold``."""
        return len(self._held)

    @property
    def hanging(self) -> int:
        """Number of batches kept back by ``hang``."""
        return len(self._hanging)

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``."""
        self.inner.attach_memory(memory)

    def attach_file(self, fd: int) -> None:
        """See ``Device``."""
        self.inner.attach_file(fd)

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        self.inner.detach_file(fd)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        assert batch
        self._tickets += 1
        broken = HeldBatch(self._tickets, op)
        hangs = False
        for position, transfer in enumerate(batch):
            self._transfers += 1
            hangs |= self._transfers in self.plan.hang
            self._reads += op is Op.READ
            number = self.plan.fail.get(self._transfers, 0)
            if not number and op is Op.WRITE and self.plan.full:
                number = errno.ENOSPC
            if number:
                broken.errors[position] = number
                continue
            if self._transfers in self.plan.tear:
                broken.errors[position] = errno.EIO
                passed = _first_half(transfer)
            elif self._transfers in self.plan.lose:
                continue
            else:
                passed = [transfer]
                if op is Op.READ and self._reads in self.plan.corrupt:
                    broken.corrupt.append((len(broken.passed), self.plan.corrupt[self._reads]))
            broken.passed += passed
            broken.positions += [position] * len(passed)
        sizes = (sum(buffer.nbytes for buffer in transfer.buffers) for transfer in batch)
        self.submitted.append(
            (op, tuple((transfer.fd, transfer.offset, size) for transfer, size in zip(batch, sizes, strict=True)))
        )
        if hangs:
            self._keep_back(broken, self._hanging)
        elif self.plan.hold:
            self._keep_back(broken, self._held)
        else:
            self._pass_on(broken)
        return broken.ticket

    def release(self, count: int | None = None) -> None:
        """Pass on the ``count`` oldest held batches (all of them by default); ``plan.hold`` stays
        as it is."""
        released = self._held[:count]
        self._held = self._held[len(released) :]
        for batch in released:
            self._pass_on(batch)

    def release_at(self, position: int) -> None:
        """Pass on one held batch, by its position among them, the oldest first."""
        self._pass_on(self._held.pop(position))

    def let_go(self) -> None:
        """Pass on the batches that hang; those that ``plan.hang`` still names will hang when they
        come."""
        hanging, self._hanging = self._hanging, []
        for batch in hanging:
            self._pass_on(batch)

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device`` and the class."""
        found = self.inner.poll(0.0 if self._ended else timeout_s)
        return self._take_ended() + [self._finish(outcome) for outcome in found]

    def drain(self) -> list[Outcome]:
        """See ``Device`` and the class."""
        self.release()
        self.let_go()
        found = self.inner.drain()
        return self._take_ended() + [self._finish(outcome) for outcome in found]

    def close(self) -> None:
        """See ``Device`` and the class; closes the inner device, too."""
        self.drain()
        self.inner.close()

    def _keep_back(self, batch: HeldBatch, kept: list[HeldBatch]) -> None:
        kept.append(batch)

    def _pass_on(self, batch: HeldBatch) -> None:
        if batch.passed:
            self._passed[self.inner.submit(batch.op, batch.passed)] = batch
        else:
            self._ended.append(Outcome(batch.ticket, batch.errors))

    def _take_ended(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    def _finish(self, outcome: Outcome) -> Outcome:
        batch = self._passed.pop(outcome.ticket)
        for place, number in outcome.errors.items():
            batch.errors.setdefault(batch.positions[place], number)
        for place, byte in batch.corrupt:
            if place not in outcome.errors:
                _flip(batch.passed[place].buffers, byte)
        return Outcome(batch.ticket, batch.errors)


def _flip(buffers: Sequence[Buffer], byte: int) -> None:
    byte %= sum(buffer.nbytes for buffer in buffers)
    for buffer in buffers:
        if byte < buffer.nbytes:
            buffer[byte] ^= 1
            return
        byte -= buffer.nbytes


def _first_half(transfer: Transfer) -> list[Transfer]:
    """Return a transfer of the first half of the bytes, in a list: empty where that is none."""
    left = sum(buffer.nbytes for buffer in transfer.buffers) // (2 * ALIGNMENT) * ALIGNMENT
    buffers = []
    for buffer in transfer.buffers:
        if left:
            buffers.append(buffer[:left])
            left -= buffers[-1].nbytes
    return [transfer._replace(buffers=tuple(buffers))] if buffers else []
