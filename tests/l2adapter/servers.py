# SPDX-License-Identifier: Apache-2.0
"""LMCache's real server as a process, and in an engine's place the client that LMCache tests its
server with: KV in host memory, and real requests to look up, store and retrieve it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmcache._version import __version__
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from l2adapter.adapters import option_for

WAIT_S = 90.0
HAS_SHM = __version__ == "0.5.5"
"""Whether the server has its memory where engines map it. The client of 0.5.5 does nothing without;
that of 0.5.6 sends its KV by messages."""
CHUNK_TOKENS = 256
BLOCKS, BLOCK_TOKENS = 128, 16
SHAPE = f"(2,{BLOCKS},{BLOCK_TOKENS},8,128):float16:4"
"""4 MiB a chunk."""
ODD_SHAPE = f"(2,{BLOCKS},{BLOCK_TOKENS},3,80):float16:5"
"""1.17 MiB a chunk, which is no multiple of a piece."""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lmcache.cli.main", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


class Server:
    """``lmcache server`` with kvdisk as its adapter. Raises RuntimeError with its log where it does
    not start."""

    def __init__(self, parameters: Any, folder: Path, *more: str) -> None:
        self.port, self.http_port = free_port(), free_port()
        self._log = folder / f"server-{self.port}.log"
        self._shm_name = f"kvdisk-tests-{self.port}"
        arguments = command(
            *("server", "--host", "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1"),
            *("--http-port", str(self.http_port), "--l1-size-gb", "0.25", "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--chunk-size", str(CHUNK_TOKENS), "--hash-algorithm", "blake3"),
            *("--supported-transfer-mode", "auto", "--disable-metrics"),
            *("--l2-adapter", option_for(parameters), *(("--shm-name", self._shm_name) if HAS_SHM else ()), *more),
        )
        with self._log.open("w") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment())
        self._until(self._is_up)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=10) as answer:
            return json.load(answer)

    @property
    def kvdisk(self) -> dict[str, Any]:
        """What the status page shows of kvdisk."""
        (found,) = self.get("/status")["storage_manager"]["l2_adapters"]
        return dict(found)

    def _is_up(self) -> bool:
        try:
            return "reading" not in self.kvdisk["models"].values()
        except OSError:
            return False

    def _until(self, is_so: Any) -> None:
        until_s = time.monotonic() + WAIT_S
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > until_s:
                self.kill()
                raise RuntimeError(self.log)
            time.sleep(0.05)

    def wait_committed(self) -> None:
        """Wait until all that engines have stored is on the drive for good."""

        def is_so() -> bool:
            store = self.get("/status")["storage_manager"]["store_controller"]
            figures = self.kvdisk["figures"]
            waiting = figures.get("uncommitted_changes", 0) + figures.get("awaiting_commit_blocks", 0)
            return not (store["pending_keys_count"] or store["in_flight_task_count"] or waiting)

        time.sleep(0.2)
        self._until(is_so)

    def kill(self) -> None:
        """End it with no chance to finish anything."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        Path("/dev/shm", self._shm_name).unlink(missing_ok=True)  # noqa: S108 - where the system has it

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()


class Engine:
    """An engine of one rank. The KV of a prompt is a function of its number, the model's name, the
    layer and the place."""

    def __init__(self, server: Server, name: str, shape: str = SHAPE, salt: str = "", tokens: int = 1024) -> None:
        self._name, self._salt, self._numbers = name, salt, iter(range(1 << 20))
        self.chunks = tokens // CHUNK_TOKENS
        config = BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{server.port}",
            http_url=f"http://127.0.0.1:{server.http_port}",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=shape,
            num_blocks=BLOCKS,
            block_size=BLOCK_TOKENS,
        )
        self._client = ServerBenchClient(config, lambda _: None)
        with self._named():
            self._client.start()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have the client use this model and tenant: it has constants for them."""
        name, make = helpers._MODEL_NAME, helpers._make_key
        functions = [each for each in vars(helpers).values() if name in (getattr(each, "__defaults__", None) or ())]
        defaults = [each.__defaults__ for each in functions]  # of those of 0.5.5
        helpers._MODEL_NAME = self._name
        helpers._make_key = lambda *args, **more: replace(make(*args, **more), cache_salt=self._salt)
        for each in functions:
            each.__defaults__ = tuple(self._name if value == name else value for value in each.__defaults__)
        try:
            yield
        finally:
            helpers._MODEL_NAME, helpers._make_key = name, make
            for each, value in zip(functions, defaults, strict=True):
                each.__defaults__ = value

    def _request(self, number: int) -> Any:
        request = self._client.create_request(number, f"{self._name}-{self._salt}-{next(self._numbers)}", "test")
        assert request is not None
        return request

    def _layers(self, request: Any) -> Iterator[tuple[int, torch.Tensor]]:
        places = slice(request.block_offset, request.block_offset + request.num_blocks)
        worker: Any = self._client._workers[0]
        # by name from 0.5.6 on
        tensors = worker.kv_caches.values() if hasattr(worker, "kv_caches") else worker.kv_tensors
        for layer, tensor in enumerate(tensors):
            yield layer, tensor[:, places]

    def _kv(self, number: int, layer: int, like: torch.Tensor) -> torch.Tensor:
        seed = hash((number, layer, len(self._name))) & 0xFFFF_FFFF
        return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)

    def compute(self, number: int) -> None:
        """Compute a prompt that hits nothing, and store it."""
        with self._named():
            request = self._request(number)
            assert self._client.lookup(request).hit_chunks == 0
            for layer, tensor in self._layers(request):
                tensor.copy_(self._kv(number, layer, tensor))
            result = self._client.store(request, 0, request.num_full_tokens)
            assert result is not None and result.succeeded
            self._client.end_session(request)

    def load(self, number: int) -> int:
        """Load what is there of a prompt; return how many chunks hit. Asserts that each has the
        right KV."""
        with self._named():
            request = self._request(number)
            hits = self._client.lookup(request).hit_chunks
            tokens = hits * CHUNK_TOKENS
            for _, tensor in self._layers(request):
                tensor.zero_()
            if hits:
                result = self._client.retrieve(request, 0, tokens)
                assert result is not None and result.succeeded
            for layer, tensor in self._layers(request):
                want = self._kv(number, layer, tensor)
                blocks = tokens // BLOCK_TOKENS
                assert torch.equal(tensor[:, :blocks], want[:, :blocks]), "WRONG BYTES"
            self._client.end_session(request)
            return hits

    def close(self) -> None:
        with self._named():
            self._client.close()
