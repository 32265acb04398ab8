# SPDX-License-Identifier: Apache-2.0
"""A device without a drive: files are bytes in RAM, and a batch runs when it is polled for."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.geometry import ALIGNMENT


class MemoryDevice:
    """``Device`` without a disk or a thread. File descriptors are names only and need not be open.

    ``poll`` and ``drain`` run all batches submitted since, in order of submission; no byte moves
    before. A file begins with ``file_bytes`` zeros, grows by writes, and keeps its bytes when it is
    detached and attached again; ``contents`` shows them.
    """

    def __init__(self, file_bytes: int = 0) -> None:
        self._file_bytes = file_bytes
        self._attached: set[int] = set()
        self._files: dict[int, bytearray] = {}
        self._waiting: list[tuple[int, Op, list[Transfer]]] = []
        self._tickets = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "memory"

    def attach_memory(self, memory: Buffer) -> None:
        pass

    def attach_file(self, fd: int) -> None:
        self._attached.add(fd)
        self._files.setdefault(fd, bytearray())

    def detach_file(self, fd: int) -> None:
        self._attached.discard(fd)

    def contents(self, fd: int) -> bytes:
        return bytes(self._files[fd]).ljust(self._file_bytes, b"\0")

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        assert not self._closed, "the device is closed"
        assert batch
        for transfer in batch:
            assert transfer.offset >= 0
            assert transfer.offset % ALIGNMENT == 0
            assert transfer.buffers
            assert all(buffer.nbytes > 0 and buffer.nbytes % ALIGNMENT == 0 for buffer in transfer.buffers)
        self._tickets += 1
        self._waiting.append((self._tickets, op, list(batch)))
        return self._tickets

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        ended = []
        for ticket, op, batch in self._waiting:
            move = self._read if op is Op.READ else self._write
            errors = {position: number for position, transfer in enumerate(batch) if (number := move(transfer))}
            ended.append(Outcome(ticket, errors))
        self._waiting = []
        return ended

    def drain(self) -> list[Outcome]:
        return self.poll()

    def close(self) -> None:
        self.drain()
        self._closed = True

    def _read(self, transfer: Transfer) -> int:
        if transfer.fd not in self._attached:
            return errno.EBADF
        data, offset = self._files[transfer.fd], transfer.offset
        for buffer in transfer.buffers:
            end = offset + buffer.nbytes
            if end > max(len(data), self._file_bytes):
                return errno.EIO
            buffer[:] = bytes(data[offset:end]).ljust(buffer.nbytes, b"\0")
            offset = end
        return 0

    def _write(self, transfer: Transfer) -> int:
        if transfer.fd not in self._attached:
            return errno.EBADF
        data = self._files[transfer.fd]
        if len(data) < transfer.offset:
            data.extend(bytes(transfer.offset - len(data)))
        offset = transfer.offset
        for buffer in transfer.buffers:
            data[offset : offset + buffer.nbytes] = buffer
            offset += buffer.nbytes
        return 0
