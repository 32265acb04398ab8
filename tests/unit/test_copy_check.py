# SPDX-License-Identifier: Apache-2.0
"""Copies are tried at start, each way, with all bytes compared; blocks are left as they were."""

from __future__ import annotations

import ctypes
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
from ranks import GEOMETRY, CpuLanes
from test_copier import BLOCKS, STACKS, odd_layers, random_bytes, separate_layers
from test_gpu_report import do_nothing, half, turned

from kvdisk.assembly import assemble_worker
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker import copier as copiers
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks
from kvdisk.worker.copy_check import check_copies


def sizes_of(groups) -> list[int]:
    return [HEADER_BYTES + round_up(max(1, group.payload_bytes), ALIGNMENT) for group in groups]


@pytest.fixture
def staging_of():
    """Makes staging with a size class for each group, and closes it."""
    made = []

    def make(groups):
        made.append(Arena(sizes_of(groups), [8] * len(groups), pin=False))
        return made[-1], range(len(groups))

    yield make
    for each in made:
        assert not any(each.memory), "what was tried stays in no slot"
        each.close()


@pytest.fixture
def straight(monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 0)


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("per_slot", [1, 3])
def test_right_copies_leave_everything_as_it_was(staging_of, layout, on_gpu, per_slot):
    layers, others = layout(), separate_layers()
    groups = [LayerBlocks(others), LayerBlocks([]), LayerBlocks(layers, per_slot)]
    before = [layer.clone() for layer in (*layers, *others)]
    lanes = CpuLanes()
    check_copies(CudaCopier(groups, lanes, 0) if on_gpu else HostCopier(groups), *staging_of(groups))
    assert all(torch.equal(layer, old) for layer, old in zip((*layers, *others), before, strict=True))
    assert bool(lanes.rows) == on_gpu, "rows were copied, too"


@pytest.mark.parametrize("per_slot", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_cache_of_few_blocks_is_tried_as_well(staging_of, blocks, per_slot):
    groups = [LayerBlocks([random_bytes(blocks, 512)], per_slot)]
    check_copies(HostCopier(groups), *staging_of(groups))


@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize("wrong", [lambda _: do_nothing, half, turned])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_that_bring_other_bytes_end_the_start(monkeypatch, staging_of, on_gpu, name, wrong):
    layers = odd_layers()
    groups, before = [LayerBlocks(layers)], [layer.clone() for layer in layers]
    copier = CudaCopier(groups, CpuLanes(), 0) if on_gpu else HostCopier(groups)
    name = f"_{name}" if on_gpu else name
    monkeypatch.setattr(type(copier), name, wrong(getattr(type(copier), name)))
    with pytest.raises(ConfigError, match=r"wrong bytes on this machine \(KV-cache group 0\)"):
        check_copies(copier, *staging_of(groups))
    assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("wrong", ["nothing", "one row", "another address", "refused"])
def test_a_straight_way_that_brings_other_bytes_is_left(monkeypatch, caplog, staging_of, wrong):
    layers = separate_layers()
    groups, lanes = [LayerBlocks(layers)], CpuLanes()
    copier = CudaCopier(groups, lanes, 0)

    def copy_rows(lane, target, source, row_bytes, count, *, pinned=False):
        if wrong == "one row":
            ctypes.memmove(target.address, source.address, row_bytes // 2)
        elif wrong == "another address":
            ctypes.memmove(target.address, source.address + row_bytes, row_bytes)
        return wrong != "refused"

    monkeypatch.setattr(lanes, "copy_rows", copy_rows)
    check_copies(copier, *staging_of(groups))
    assert not lanes.copies_rows
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_cuda_raises_is_one_sentence(monkeypatch, staging_of):
    groups = [LayerBlocks(separate_layers())]
    copier = HostCopier(groups)
    monkeypatch.setattr(copier, "gather", Mock(side_effect=RuntimeError("CUDA error: out of memory\nmore")))
    with pytest.raises(ConfigError, match=r"host memory: CUDA error: out of memory$"):
        check_copies(copier, *staging_of(groups))


def test_a_worker_does_not_start_with_such_copies_and_starts_with_others(monkeypatch):
    layers = [[random_bytes(BLOCKS, 2048) for _ in range(3)], [random_bytes(BLOCKS, 1000)]]
    config, made = Config(cpu_bytes=1 << 20), []
    with closing(assemble_worker(config, GEOMETRY, 0, layers)):
        pass
    monkeypatch.setattr(HostCopier, "scatter", do_nothing)
    monkeypatch.setattr(
        "kvdisk.worker.arena.Arena", lambda *args, **fields: made.append(Arena(*args, **fields)) or made[-1]
    )
    with pytest.raises(ConfigError, match="wrong bytes"):
        assemble_worker(config, GEOMETRY, 0, layers)
    assert len(made) == 1 and made[0]._memory is None, "before the CPU tier is taken"
