# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind LMCache's real factory, with LMCache's own memory objects: who tests it says itself
what is stored, looked up and loaded."""

from __future__ import annotations

import argparse
import hashlib
import json
import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

ARENA_BYTES = 96 << 20
NAME = "a-model"
WAIT_S = 60.0


def write_model(folder: Path, weights: int = 1, **config: Any) -> Path:
    """Write what kvdisk reads of a model: a configuration, and weights with this number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    data = bytes([weights]) * 4096
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def parameters_for(store: Path, model: Any, nvme_bytes: Any = "256MiB", **settings: Any) -> dict[str, Any]:
    """Return ``adapter_params``. ``model``: a path, or what a user writes of the model."""
    kvdisk = {"store_dirs": str(store), "nvme_bytes": nvme_bytes, "nvme_admission": "all", "io_deadline_s": 60}
    source = str(model) if isinstance(model, Path) else model
    return {"models": {NAME: source}, "kvdisk": {**kvdisk, **settings}}


def option_for(parameters: Any) -> str:
    """Return what a user writes after ``--l2-adapter``."""
    plugin = {"type": "plugin", "module_path": "kvdisk.lmcache", "class_name": "L2Adapter"}
    return json.dumps(plugin | {"adapter_params": parameters})


def key_of(number: int, *, salt: str = "", group: int = 0, rank: int = 0x01000100, name: str = NAME) -> ObjectKey:
    """Return a key as LMCache's server has them."""
    return ObjectKey(hashlib.sha256(f"chunk {number}".encode()).digest(), name, rank, group, salt)


class Arena:
    """LMCache's memory of the first level, and objects in it, one behind the other."""

    def __init__(self, size: int = ARENA_BYTES, align: int = 4096) -> None:
        self._backing = torch.zeros(size + align, dtype=torch.uint8)
        start = -self._backing.data_ptr() % align
        self._flat, self._align, self._used = self._backing[start : start + size], align, 0
        self.desc = L1MemoryDesc(ptr=self._flat.data_ptr(), size=size, align_bytes=align)

    def reset(self) -> None:
        """Fill all with one byte, and give it all back."""
        self._flat.fill_(0xEE)
        self._used = 0

    def make(self, size: int, dtype: torch.dtype = torch.uint8) -> TensorMemoryObj:
        """Return an object of so many bytes, as LMCache's allocator makes them."""
        taken = -(-size // self._align) * self._align
        assert self._used + taken <= len(self._flat)
        raw = self._flat[self._used : self._used + taken]
        shape = torch.Size([size // dtype.itemsize])
        data = MemoryObjMetadata(
            shape, dtype, self._used, taken, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype]
        )
        self._used += taken
        return TensorMemoryObj(raw_data=raw, metadata=data, parent_allocator=None)


def content_of(number: int, size: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def bytes_of(each: TensorMemoryObj) -> np.ndarray:
    return np.frombuffer(each.byte_array, np.uint8)


class Driver:
    """An adapter, made by LMCache's factory from a user's option, and driven as LMCache's threads
    do."""

    def __init__(self, parameters: Any, arena: Arena | None = None) -> None:
        """``parameters``: kvdisk's, or the whole option as text."""
        self.arena = arena or Arena()
        option = parameters if isinstance(parameters, str) else option_for(parameters)
        options = argparse.Namespace(l2_adapter=[option])
        (config,) = parse_args_to_l2_adapters_config(options).adapters
        self.adapter: Any = create_l2_adapter(config, self.arena.desc)
        self.adapter.set_backend_identity("plugin")

    def wait_known(self) -> Driver:
        """Wait until the weights of all models are known."""
        until_s = time.monotonic() + WAIT_S
        while "reading" in self.adapter.report_status()["models"].values():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return self

    def _until(self, fd: int, ask: Any) -> Any:
        """Ask after each wake-up, as LMCache does, until there is an answer."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while True:
            assert poller.poll(WAIT_S * 1000), "no wake-up came"
            consume_fd(fd)
            if (answer := ask()) is not None:
                return answer

    def store_bytes(self, keys: list[ObjectKey], sizes: list[int], seeds: list[int]) -> bool:
        """Store objects with the content of these numbers; return whether that succeeded."""
        self.arena.reset()
        objects = [self.arena.make(size) for size in sizes]
        for each, size, seed in zip(objects, sizes, seeds, strict=True):
            bytes_of(each)[:] = content_of(seed, size)
        return bool(self.store(keys, objects).is_successful())

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        pop = self.adapter.pop_completed_store_tasks
        return self._until(self.adapter.get_store_event_fd(), lambda: pop().get(task))

    def look_up(self, keys: list[ObjectKey], sizes: dict[int, int], dtype: torch.dtype = torch.uint8) -> list[bool]:
        """Look objects up. ``sizes``: of the objects of each group."""
        descs = {
            group: MemoryLayoutDesc([torch.Size([size // dtype.itemsize])], [dtype]) for group, size in sizes.items()
        }
        task = self.adapter.submit_lookup_and_lock_task(keys, descs)
        query = self.adapter.query_lookup_and_lock_result
        bitmap = self._until(self.adapter.get_lookup_and_lock_event_fd(), lambda: query(task))
        return [bitmap.test(at) for at in range(len(keys))]

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        query = self.adapter.query_load_result
        bitmap = self._until(self.adapter.get_load_event_fd(), lambda: query(task))
        self.adapter.submit_unlock(keys)
        return [bitmap.test(at) for at in range(len(keys))]

    def load_and_compare(self, keys: list[ObjectKey], sizes: list[int], seeds: list[int]) -> list[bool]:
        """Load objects. Asserts that each that came has its bytes, and that nothing was written
        outside of the objects."""
        self.arena.reset()
        objects = []
        for size in sizes:
            objects += [self.arena.make(size), self.arena.make(1)]
        loaded = self.load(keys, objects[::2])
        for each, fence, has_come, seed in zip(objects[::2], objects[1::2], loaded, seeds, strict=True):
            if has_come:
                assert (bytes_of(each) == content_of(seed, len(bytes_of(each)))).all(), "WRONG BYTES"
            assert bytes_of(fence)[0] == 0xEE, "it wrote behind an object"
        return loaded

    def close(self) -> None:
        self.adapter.close()
