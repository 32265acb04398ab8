# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that runs vLLM's own tests of its ``fs`` tier over kvdisk's:

    python -m pytest -p fs_tier_tests test_fs_tier.py

The tests are as vLLM has them. Their memory is shared, as an engine's is; where they ask for the
file of a key, they get one that exists while kvdisk has the key.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs import manager as fs

from kvdisk import store
from kvdisk.connector.tier import KVDiskTier
from kvdisk.store import Presence

LEFT_OUT = {
    "test_invalid_path_raises_at_construction": "kvdisk goes on with memory alone, and says so",
    "test_invalid_locality_raises_at_construction": "kvdisk refuses it in a sentence of its own",
    "test_shutdown_discards_pending_tasks": "looks at threads of the fs tier",
    "test_wait_idle_blocks_until_tasks_complete": "looks at threads of the fs tier",
    "test_store_load_roundtrip_without_o_direct": "looks at the fs tier's way of opening files",
    "test_batch_lookup_c_extension": "looks at vLLM's own files",
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": "damages a file of the fs tier",
    "test_batched_partial_load_failure_keeps_loaded_blocks": "damages a file of the fs tier",
    "test_batched_load_first_block_fails_marks_whole_batch": "damages a file of the fs tier",
    "test_transient_load_failure_leaves_file": "damages a file of the fs tier",
    "test_store_accepts_block_published_by_another_writer": "looks into a file of the fs tier",
    "test_failed_load_after_abort_does_not_break_newer_probe": "has to wait for an answer that kvdisk knows at once",
    "test_mixed_job_results_emit_event_only_for_successful_job": "plants a fault in the fs tier",
    "test_partially_failed_store_emits_no_event": "plants a fault in the fs tier",
}
"""Tests that cannot be run over another tier, and why; kvdisk's own have their like."""
STEP_S = 0.01


class _Names:
    """Files that exist as long as kvdisk has the keys."""

    def __init__(self, tier: FsTier, folder: Path) -> None:
        self._tier = tier
        self._folder = folder
        self.base_path = str(folder)
        folder.mkdir(exist_ok=True)

    def get_file_name(self, key: OffloadKey) -> str:
        path = self._folder / key.hex()
        path.unlink(missing_ok=True)
        block = self._tier._names.block(key)
        if self._tier.store.presence([block]) == bytes([Presence.READY]):
            path.touch()
        return str(path)


class FsTier(KVDiskTier):
    """kvdisk's tier with the constructor of vLLM's ``fs`` tier. vLLM's tests wait by
    ``drain_jobs``, which is no reset here."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **settings: Any) -> None:
        root = settings.pop("root_dir")
        for name in ("n_read_threads", "n_write_threads"):
            settings.pop(name, None)
        ours = {"store_dirs": f"{root}/store", "nvme_bytes": "256MiB", "namespace": "tests", "on_reset": "keep"}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **ours, **settings)
        assert not self.is_off
        self.file_mapper = _Names(self, Path(root) / "names")
        self._lookup_manager = SimpleNamespace(
            _pending_results=SimpleNamespace(empty=lambda: False),  # who looks up knows at once
            _lookup_batch=[],
        )
        self._store_job_keys: dict[int, Any] = {}

    @property
    def events(self) -> object | None:
        """None: none are published."""
        return self._published

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See ``KVDiskTier``. Its segment's first opening may outlast a test's wait."""
        done = list(super().get_finished_jobs())
        time.sleep(0 if done else STEP_S)
        return done


def _memory(num_blocks: int, block_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what vLLM's helper of the tests does, in memory that another process can map."""
    row_bytes = block_elements * dtype.itemsize
    file = os.memfd_create("rows")
    os.truncate(file, num_blocks * row_bytes)
    shared = mmap.mmap(file, num_blocks * row_bytes)
    os.close(file)
    return torch.from_numpy(np.frombuffer(shared, np.uint8)).view(dtype).view(num_blocks, block_elements)


def _with_a_group(make_spec: Any) -> Any:
    def make(*args: Any, **fields: Any) -> Any:
        spec = make_spec(*args, **fields)
        group = OffloadingGroupConfig(spec.config.cache.tokens_per_hash, ("layer",), 0)
        spec.config = spec.config.__class__(**{**vars(spec.config), "groups": (group,)})
        return spec

    return make


def pytest_configure() -> None:
    """Put kvdisk's tier in the place of vLLM's, before the tests import it. Their memory has four
    or eight rows, of which a quarter may wait for the drive's first room."""
    store.ROOM_SHARE = 1.0
    fs.FileSystemTierManager = FsTier
    SecondaryTierFactory._registry["fs"] = lambda: FsTier


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what does not apply, and give the tests memory and a group."""
    left_out = [item for item in items if item.originalname in LEFT_OUT]
    items[:] = [item for item in items if item.originalname not in LEFT_OUT]
    config.hook.pytest_deselected(items=left_out)
    for module in {item.module for item in items}:
        module._page_aligned_zero_tensor = _memory
        module._make_offloading_spec = _with_a_group(module._make_offloading_spec)
        module._MOCK_OFFLOADING_SPEC = module._make_offloading_spec()
