# SPDX-License-Identifier: Apache-2.0
"""KV that is the same on every rank (MLA under tensor parallelism): on the drive once, in every
rank's memory."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_children import SEED, Child
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.live_process import ProcessSettings
from support.live_rank import LocalRank, make_worker
from test_live_neighbours import PROMPTS

from kvdisk.assembly import WorkerParts
from kvdisk.config import Config
from kvdisk.errors import DeviceError
from kvdisk.messages import SegmentSpec
from kvdisk.worker.files import HomeFiles
from kvdisk.worker.routes import OpenFile

RANKS = 3
MODEL = LiveModel(ranks=RANKS, windowed=True, replicated=True)
GROUPS = MODEL.geometry.groups


def start(store: Path, *, model: LiveModel = MODEL, make_rank: Any = LocalRank, **config: object) -> LiveEngine:
    values = {"store_decode": True, "cpu_bytes": "1MiB"} | config
    return LiveEngine(model.config(str(store), blocks=200, **values), model, make_rank)


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


class _Refusing(HomeFiles):
    """Files of a rank that cannot open what another rank has made."""

    def open_segment(self, spec: SegmentSpec) -> OpenFile | None:
        if not spec.create and not self._writes(spec):
            raise DeviceError(errno.EIO, "planted")
        return super().open_segment(spec)


def test_a_segment_that_not_all_ranks_can_open_is_given_up(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_rank(config: Config, model: LiveModel, rank: int, block_count: int) -> LocalRank:
        def make(config: Config, model: LiveModel, rank: int, layers: list[list[torch.Tensor]]) -> WorkerParts:
            with monkeypatch.context() as patched:
                if rank == RANKS - 1:
                    patched.setattr("kvdisk.worker.files.HomeFiles", _Refusing)
                return make_worker(config, model, rank, layers)

        return LocalRank(config, model, rank, block_count, make)

    engine = start(quick_path / "store", make_rank=make_rank)
    engine.serve(PROMPTS[:2])
    audit(engine)
    files = _files(quick_path / "store")
    assert all(segment % RANKS == RANKS - 1 for segment in files), "those of others are gone, with their files"
    engine.close()


def test_a_writer_that_has_no_room_undoes_the_segment(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = HomeFiles.open_segment

    def open_segment(self: HomeFiles, spec: SegmentSpec) -> OpenFile | None:
        if spec.create and self._writes(spec):
            made.append(self._rank)
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


def test_under_load_with_evictions_and_resets(quick_path: Path) -> None:
    settings = ProcessSettings(
        str(quick_path / "store"),
        seed=SEED,
        ranks=RANKS,
        windowed=True,
        replicated=True,
        blocks=24,
        requests=150,
        resets=0.02,
        audit=True,
    )
    for number in range(2):
        with Child(quick_path, replace(settings, seed=SEED + number)) as child:
            assert child.end()["blocks"] > 0
