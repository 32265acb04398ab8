# SPDX-License-Identifier: Apache-2.0
"""KV that is the same on every rank (MLA under tensor parallelism): on the drive once, in every
rank's memory."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from test_live_neighbours import PROMPTS

from kvdisk.errors import DeviceError
from kvdisk.messages import SegmentSpec
from kvdisk.worker.files import HomeFiles
from kvdisk.worker.routes import OpenFile

RANKS = 3
MODEL = LiveModel(ranks=RANKS, windowed=True, replicated=True)
GROUPS = MODEL.geometry.groups


def start(store: Path, model: LiveModel = MODEL, *, blocks: int = 200, **config: object) -> LiveEngine:
    values = {"store_decode": True, "cpu_bytes": "1MiB"} | config
    return LiveEngine(model.config(str(store), blocks=blocks, **values), model)


def _files(store: Path) -> dict[int, list[str]]:
    """The files of each segment of the only home."""
    (segments,) = store.glob("homes/*/segments")
    return {int(path.name): sorted(file.name for file in path.iterdir()) for path in segments.iterdir()}


@pytest.mark.parametrize("cpu_bytes", ["1MiB", 0], ids=["from memory", "through staging"])
def test_each_block_is_written_once_and_read_by_all(cpu_bytes: object, quick_path: Path) -> None:
    engine = start(quick_path / "store", cpu_bytes=cpu_bytes)
    engine.serve(PROMPTS)
    blocks = audit(engine)
    stats = engine.manager.stats
    groups = [int.from_bytes(record.key[-2:], "big") for record in engine.parts.index.blocks()]
    assert stats.sum_of("transfer_bytes.cpu_to_nvme") == sum(GROUPS[group].slot_bytes for group in groups), (
        "once, not by each rank"
    )
    engine.close()
    files = _files(quick_path / "store")
    assert len({segment % RANKS for segment in files}) > 1, "several ranks write"
    assert {name for names in files.values() for name in names} == {"rank0.kv"}

    again = start(quick_path / "store", cpu_bytes=cpu_bytes)
    assert audit(again) == blocks
    again.serve(PROMPTS)
    stats = again.manager.stats
    assert stats["hit_tokens.nvme"] > 0
    assert stats["failed_loads"] == 0
    read = stats.sum_of("transfer_bytes.nvme_to_cpu")
    assert read % RANKS == 0, "every rank reads what it loads"
    assert read
    audit(again)
    again.close()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_any_other_number_of_ranks_goes_on(ranks: int, quick_path: Path) -> None:
    """It reads what they have written, and writes and removes where others did."""
    engine = start(quick_path / "store")
    engine.serve(PROMPTS)
    blocks = audit(engine)
    engine.close()
    other = LiveModel(ranks=ranks, windowed=True, replicated=ranks > 1)
    again = start(quick_path / "store", other, blocks=blocks)
    assert audit(again) == blocks
    again.serve(PROMPTS)
    assert again.manager.stats["hit_tokens.nvme"] > 0 and again.manager.stats["failed_loads"] == 0
    again.serve([f"{letter * 40} and what is behind it" for letter in "hijklmnop"])
    assert again.manager.stats["evicted_blocks.nvme"] > 0
    audit(again)
    again.close()
    assert {name for names in _files(quick_path / "store").values() for name in names} == {"rank0.kv"}


def test_a_lost_index_is_rebuilt_from_the_one_file_of_each_segment(quick_path: Path) -> None:
    engine = start(quick_path / "store")
    engine.serve(PROMPTS)
    blocks = audit(engine)
    engine.close()
    (index,) = (quick_path / "store").glob("homes/*/index")
    shutil.rmtree(index)
    again = start(quick_path / "store")
    assert audit(again) == blocks
    again.serve(PROMPTS)
    assert again.manager.stats["hit_tokens.nvme"] > 0
    again.close()


def test_a_writer_that_has_no_room_undoes_the_segment(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = HomeFiles.open_segment

    def open_segment(self: HomeFiles, spec: SegmentSpec) -> OpenFile | None:
        if spec.create and self._writes(spec):
            made.append(self._number)
            raise DeviceError(errno.ENOSPC, "planted")
        return original(self, spec)

    monkeypatch.setattr(HomeFiles, "open_segment", open_segment)
    engine = start(quick_path / "store")
    engine.serve(PROMPTS[:2])
    assert made
    assert engine.manager.stats["segment_failures"] > 0
    audit(engine)
    assert _files(quick_path / "store") == {}
    engine.close()
