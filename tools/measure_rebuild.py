# SPDX-License-Identifier: Apache-2.0
"""A part of ``measure_store``: how long a home's index takes to be made anew from the headers of its slots."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvdisk.assembly import describe_geometry
from kvdisk.blocks import BlockKey
from kvdisk.device.header import SlotHeader, write_header
from kvdisk.device.home import Home
from kvdisk.device.rebuild import THREADS
from kvdisk.device.segment import create_segment, scan_file
from kvdisk.device.store import Store
from kvdisk.geometry import HEADER_BYTES, Geometry, Namespace, slot_offset
from kvdisk.messages import SegmentSpec
from kvdisk.recovery import rebuild_index

FINGERPRINT = b"\x3f" * 32
CAP_BYTES = 1 << 44


class HomeOfHeaders:
    """A home with whole segments of which only the headers were ever written: no payload is read in a rebuild."""

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        segment_count: int,
        segment_slots: int,
        name_of: Callable[[int], tuple[BlockKey, BlockKey | None]],
    ) -> None:
        description = {"geometry": describe_geometry(geometry)}
        self.block_count = segment_count * segment_slots
        self._home: Home = Store.open(path).acquire_home(FINGERPRINT, description, CAP_BYTES)
        self._segments: Sequence[int] = range(segment_count)
        slot_bytes, payload_bytes = geometry.slot_sizes[0], geometry.groups[0].payload_bytes
        block = mmap.mmap(-1, HEADER_BYTES)
        for segment in self._segments:
            spec = SegmentSpec(segment, slot_bytes, segment_slots)
            file = create_segment(self._home.folder(0), spec, 0, 1, FINGERPRINT)
            for slot in range(segment_slots):
                number = segment * segment_slots + slot
                key, parent = name_of(number)
                with memoryview(block) as view:
                    write_header(
                        view,
                        SlotHeader(
                            Namespace(FINGERPRINT, 0), key, 10**18 + number, parent, payload_bytes, 0, 1, bytes(16)
                        ),
                    )
                os.pwritev(file.fd, [block], slot_offset(slot_bytes, slot))
            os.fsync(file.fd)
            file.close()

    def rebuild(self) -> tuple[float, float]:
        """Return the time and the processor time of a header, in microseconds."""
        shutil.rmtree(self._home.index_path, ignore_errors=True)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        done = rebuild_index(self._home, index_bytes=0)
        took_s, took_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        assert done.blocks == self.block_count
        return 1e6 * took_s / done.blocks, 1e6 * took_cpu_s / done.blocks

    def read_alone(self) -> tuple[float, float]:
        """Return the same of reading each header, one by one, with as many threads, and doing nothing with it."""

        def read(segment: int) -> None:
            file = scan_file(self._home.folder(0), segment, 0)
            with memoryview(mmap.mmap(-1, HEADER_BYTES)) as view:
                for slot in range(file.slot_count):
                    os.preadv(file.fd, [view], slot_offset(file.slot_bytes, slot))
            file.close()

        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(read, self._segments))
        took_s, took_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return 1e6 * took_s / self.block_count, 1e6 * took_cpu_s / self.block_count

    def close(self) -> None:
        """Give the home back."""
        self._home.close(clean=False)


def quiet() -> None:
    """Do not show what a rebuild warns of."""
    logging.getLogger("kvdisk").setLevel(logging.ERROR)
