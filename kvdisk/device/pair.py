# SPDX-License-Identifier: Apache-2.0
"""GPU memory as a buffer of transfers, and the device that moves both kinds of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvdisk.device.base import Buffer, Device, Op, Outcome, Transfer


class GpuRange:
    """A range of GPU memory by its address, in the place of a ``Buffer``.

    Like the memoryviews of host memory it has ``nbytes`` and ``readonly`` and is sliced in bytes,
    so that parts and transfers are cut the same way. It offers no buffer protocol: a device that
    does not know it refuses it instead of reading an address of another machine. ``owner``: what
    keeps the memory alive; slices share it. ``address`` and ``nbytes``: multiples of
    ``geometry.ALIGNMENT``. Immutable; any thread.
    """

    __slots__ = ("address", "nbytes", "owner")
    readonly = False

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        assert address >= 0 and nbytes >= 0
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def __getitem__(self, part: slice) -> GpuRange:
        start, end, step = part.indices(self.nbytes)
        assert step == 1
        return GpuRange(self.address + start, max(0, end - start), self.owner)

    def __len__(self) -> int:
        return self.nbytes

    def release(self) -> None:
        """Do nothing; a memoryview would let go of its memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What kvikio and torch know GPU memory by."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


_TURN_S = 0.0002
"""How long one of the two is waited for, while the other may end something too."""


class PairDevice:
    """``Device`` that gives batches of ``GpuRange`` to ``gpu`` and all others to ``host``.

    Both know all files. A file that ``gpu`` cannot take fails batches of GPU memory only. Owns both
    and closes them.
    """

    def __init__(self, host: Device, gpu: Device) -> None:
        self._both = (host, gpu)
        self._tickets = 0
        self._in_flight: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Our ticket, by each device's."""
        self._turn = 0

    @property
    def name(self) -> str:
        """See ``Device``."""
        return "+".join(device.name for device in self._both)

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``."""
        self._both[isinstance(memory, GpuRange)].attach_memory(memory)

    def attach_file(self, fd: int) -> None:
        """See ``Device``."""
        for device in self._both:
            device.attach_file(fd)

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        for device in self._both:
            device.detach_file(fd)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        kinds = {isinstance(buffer, GpuRange) for transfer in batch for buffer in transfer.buffers}
        assert len(kinds) == 1, "a batch of host memory and GPU memory"
        which = kinds.pop()
        self._tickets += 1
        self._in_flight[which][self._both[which].submit(op, batch)] = self._tickets
        return self._tickets

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        deadline_s = time.monotonic() + timeout_s
        ended = self._noted(device.poll() for device in self._both)
        while not ended and any(self._in_flight):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                break
            if all(self._in_flight):
                self._turn = 1 - self._turn
                remaining_s = min(remaining_s, _TURN_S)
            else:
                self._turn = int(bool(self._in_flight[1]))
            found: list[list[Outcome]] = [[], []]
            found[self._turn] = self._both[self._turn].poll(remaining_s)
            ended = self._noted(found)
        return ended

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        return self._noted([device.drain() for device in self._both])

    def close(self) -> None:
        """See ``Device``."""
        for device in self._both:
            device.close()

    def _noted(self, found: Iterable[list[Outcome]]) -> list[Outcome]:
        """Return outcomes of both devices, in their order, under our tickets."""
        return [
            Outcome(tickets.pop(outcome.ticket), outcome.errors)
            for tickets, outcomes in zip(self._in_flight, found, strict=True)
            for outcome in outcomes
        ]
