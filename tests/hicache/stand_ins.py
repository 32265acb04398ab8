# SPDX-License-Identifier: Apache-2.0
"""SGLang's package on a machine without a GPU: what stands in for what it imports and this machine
has not.

The package that this is in imports it before anything of SGLang. Nothing of SGLang's own code is
replaced but four things, all named here: the package's ``__init__``, which imports the whole front
end; the pinning of host pools; the memory that SGLang leaves free beside them; and the copies
between GPU and host memory, which are torch's own on the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.codecache  # noqa: F401  before there is a triton that is none
from transformers import AutoConfig, AutoProcessor, PretrainedConfig  # noqa: F401  for the same reason

ABSENT = frozenset(
    (
        *("aiter", "flashinfer", "petit_kernel", "pynvml", "sgl_kernel", "triton", "triton_kernels"),
        *("gguf", "IPython", "torchcodec", "torchvision"),
    )
)
"""Modules of GPUs, and of parts of SGLang that no cache uses: empty ones stand in for them, whose
names are anything."""


class _Anything:
    """Stands for a decorator, a type or a constant of a module that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, _: Any) -> Any:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _: Any) -> Any:
        return object

    __ror__ = __or__


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - as its base has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in the line: finds what nobody else has, for SGLang alone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT or not _asked_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by_sglang() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "sglang" in frame.f_code.co_filename


def _import_package() -> None:
    """Have ``sglang`` without its ``__init__``."""
    spec = importlib.machinery.PathFinder.find_spec("sglang")
    assert spec is not None and spec.origin, "SGLang's package is not on PYTHONPATH: run make test-engines"
    # SGLang compiles how it hashes tokens when it first does: a minute on a busy machine.
    place = Path(spec.origin).parents[1]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(place.with_name(f"{place.name}-compiled")))
    module = types.ModuleType("sglang")
    module.__path__ = list(spec.submodule_search_locations or ())
    module.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules["sglang"] = module


def _pin_nothing() -> None:
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GB, which a machine for tests may not have
    begin = base.HostKVCache.__init__

    def init(self: Any, **settings: Any) -> None:
        begin(self, **settings | {"pin_memory": False})

    base.HostKVCache.__init__ = init


def _copy_on_cpu() -> None:
    """Copy between device pool and host pool with torch: SGLang has kernels for GPUs only."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    def layers(host: Any, device: Any, indices: Any) -> Iterator[tuple[int, Any, Any]]:
        """Yield of each layer and part its number, the device's tensor, and the host's rows."""
        is_mla = isinstance(host, MLATokenToKVPoolHost)
        parts = [host.kv_buffer] if is_mla else [host.kv_buffer[0], host.kv_buffer[1]]
        for layer in range(host.layer_num):
            on_device = [device.kv_buffer[layer]] if is_mla else [device.k_buffer[layer], device.v_buffer[layer]]
            for each, whole in zip(on_device, parts, strict=True):
                yield layer, each, whole[layer] if host.layout == "layer_first" else whole[:, layer]

    def view(host: Any, on_host: Any, indices: Any) -> Any:
        """Return the place of tokens in a layer of the host pool, as a pair for indexing."""
        if host.layout == "page_first_direct":
            return indices // host.page_size, indices % host.page_size
        return (indices,)

    def backup(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
        for _, on_device, on_host in layers(self, device_pool, host_indices):
            on_host[view(self, on_host, host_indices)] = on_device[device_indices].reshape(
                len(device_indices), *on_host.shape[-2:]
            )

    def load(
        self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: Any
    ) -> None:
        for layer, on_device, on_host in layers(self, device_pool, host_indices):
            if layer == layer_id:
                on_device[device_indices] = on_host[view(self, on_host, host_indices)].reshape(
                    len(device_indices), *on_device.shape[1:]
                )

    for pool in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        pool.backup_from_device_all_layer = backup
        pool.load_to_device_per_layer = load


sys.meta_path.append(_Finder())
_import_package()
_pin_nothing()
_copy_on_cpu()
