# SPDX-License-Identifier: Apache-2.0
"""A home's part with segment files, without the store around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from kvdisk.device.segment import create_segment
from kvdisk.geometry import segment_file_bytes
from kvdisk.messages import SegmentSpec

FINGERPRINT = bytes(range(32))
SPEC = SegmentSpec(segment=5, slot_bytes=12288, slot_count=3)
FILE_BYTES = segment_file_bytes(SPEC.slot_bytes, SPEC.slot_count)


def home_in(tmp_path: Path) -> SimpleNamespace:
    path = tmp_path / "homes" / ("a" * 32) / "segments"
    path.mkdir(parents=True)
    return SimpleNamespace(segments_path=path)


def create(home, spec=SPEC, rank=0, rank_count=2):
    return create_segment(home, spec, rank, rank_count, FINGERPRINT)


def path_of(home, rank=0, segment=5) -> Path:
    return home.segments_path / str(segment) / f"rank{rank}.kv"


def names(home) -> list[str]:
    return sorted(str(path.relative_to(home.segments_path)) for path in home.segments_path.rglob("*"))
