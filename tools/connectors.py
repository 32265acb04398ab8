# SPDX-License-Identifier: Apache-2.0
"""The ways to keep KV that are run beside each other: what vLLM is given for each, and what its
directory holds.

vLLM's worker for its own host memory needs a GPU. On its CPU build the tests' own copies on the
host stand for it, and all else of its ``OffloadingConnector`` is vLLM's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_child import CONNECTOR, CPU, START_S, EngineChild, EngineError, vllm_device

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
HOST_SPEC = {"spec_name": "HostTieringSpec", "spec_module_path": "host_offloading"}
FLIPPED_EVERY_BYTES = 64 << 10
PAYLOADS = ("*.bin", "*.kv", "*.data", "[0-9a-f]" * 40)
"""Files of ``fs``, of kvdisk, of LMCache and of lifeboatcache that hold KV."""
QUIET_S = 1.0


@dataclass(frozen=True)
class Way(ABC):
    """A way to keep KV. ``name``: in tables; ``files``: whether it has a directory, and finds what
    is there after a restart; ``is_ours``: whether it is kvdisk that answers for the bytes."""

    name: str
    files: bool = True
    is_ours: bool = False

    @abstractmethod
    def transfer_config(self, place: Path, memory_bytes: int, cap_bytes: int) -> dict[str, Any]:
        """Return vLLM's ``kv_transfer_config``. ``cap_bytes``: the most that ``place`` may hold,
        where a way takes a cap."""

    @contextmanager
    def beside(self, place: Path, memory_bytes: int, log: Path) -> Iterator[subprocess.Popen[bytes] | None]:  # noqa: ARG002
        """Run what has to run beside engines, and yield its process; None where nothing has to."""
        yield None


class Direct(Way):
    """``KVDiskConnector``."""

    def transfer_config(self, place: Path, memory_bytes: int, cap_bytes: int) -> dict[str, Any]:
        """See ``Way``."""
        return _connector(CONNECTOR, _drive(place, cap_bytes) | {"cpu_bytes": memory_bytes, "min_load_tokens": 0})


@dataclass(frozen=True)
class Offloading(Way):
    """vLLM's ``OffloadingConnector``. ``tier``: behind its memory."""

    tier: str = ""

    def transfer_config(self, place: Path, memory_bytes: int, cap_bytes: int) -> dict[str, Any]:
        """See ``Way``."""
        tiers = self._tiers(place, cap_bytes)
        extra: dict[str, Any] = {"cpu_bytes_to_use": memory_bytes}
        if vllm_device() == CPU:
            extra |= HOST_SPEC | {"secondary_tiers": tiers}
        elif tiers:
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
        return _connector("OffloadingConnector", extra)

    def _tiers(self, place: Path, cap_bytes: int) -> list[dict[str, Any]]:
        if self.tier == "fs":
            return [{"type": "fs", "root_dir": str(place)}]
        return [{"type": self.tier, **_drive(place, cap_bytes)}] if self.tier else []


class Lifeboat(Offloading):
    """lifeboatcache as a tier of vLLM's, as its own plugin sets it."""

    def _tiers(self, place: Path, cap_bytes: int) -> list[dict[str, Any]]:
        on_drive = {"path": str(place), "capacity_gb": cap_bytes / GIB, "min_free_gb": 0}
        config = {"storage": {"fallback_local": on_drive}, "dashboard": {"enabled": False}}
        module = "lifeboat_cache.integrations.vllm_tier"
        return [{"type": "LifeboatTier", "module_path": module, "lifeboat_config": config}]


@dataclass(frozen=True)
class LmCache(Way):
    """LMCache's server, with its files. ``port``: where it listens."""

    port: int = 0

    def transfer_config(self, place: Path, memory_bytes: int, cap_bytes: int) -> dict[str, Any]:  # noqa: ARG002
        """See ``Way``."""
        extra = {"lmcache.mp.port": self.port, "lmcache.mp.mq_timeout": 60.0}
        on_cpu = {"kv_connector_module_path": "host_lmcache"} if vllm_device() == CPU else {}
        return _connector("LMCacheMPConnector", extra) | on_cpu

    @contextmanager
    def beside(self, place: Path, memory_bytes: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run its server. Raises EngineError."""
        http = free_port()
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self.port), "--http-port", str(http)),
            *("--l1-size-gb", f"{memory_bytes / GIB:.3f}", "--eviction-policy", "LRU", "--disable-observability"),
            *("--supported-transfer-mode", "auto"),  # on CPUs the engine moves the bytes
            *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(place)})),
        ]
        with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                _await_http(http, server, log)
                yield server
            finally:
                server.terminate()


ALL_WAYS = (
    Direct("kvdisk", is_ours=True),
    Offloading("kvdisk as tier", is_ours=True, tier="kvdisk"),
    Offloading("memory", files=False),
    Offloading("memory, fs", tier="fs"),
)
"""Those that need nothing but vLLM."""


def ways_here() -> list[Way]:
    """Return all that are installed."""
    others = {"lmcache": LmCache("LMCache", port=free_port()), "lifeboat_cache": Lifeboat("memory, lifeboatcache")}
    return [*ALL_WAYS, *(way for package, way in others.items() if importlib.util.find_spec(package) is not None)]


def python_path() -> dict[str, str]:
    """Return what an engine's environment needs for ``HOST_SPEC``."""
    paths = [str(ROOT / "tests" / "connector"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def segment_bytes(cap_bytes: int) -> int:
    """Return the bytes of a segment file for a store of ``cap_bytes``: a 16th, 16 MiB to 1 GiB."""
    return max(16 << 20, min(GIB, 1 << (cap_bytes // 16).bit_length() - 1))


def taken_bytes(directory: Path) -> int:
    """Return what a directory's files take of the drive."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def await_quiet(directory: Path, most_s: float = 60.0) -> None:
    """Wait until a directory takes no more of the drive than a while ago."""
    before, now, end_s = -1, taken_bytes(directory), time.monotonic() + most_s
    while now != before and time.monotonic() < end_s:
        time.sleep(QUIET_S)
        before, now = now, taken_bytes(directory)


def flip_bits(directory: Path) -> int:
    """Flip a bit of an exponent in every 64 KiB of KV on the drive; return how many."""
    flipped = 0
    for pattern in PAYLOADS:
        for path in directory.rglob(pattern):
            with path.open("r+b") as file:
                for at in range(FLIPPED_EVERY_BYTES // 2 + 3, path.stat().st_size, FLIPPED_EVERY_BYTES):
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 0x40]))
                    flipped += 1
    return flipped


def kill(engine: EngineChild, beside: subprocess.Popen[bytes] | None) -> None:
    """End all that stores, with no chance to finish anything."""
    engine.kill()
    if beside is not None:
        beside.kill()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _drive(place: Path, cap_bytes: int) -> dict[str, Any]:
    """Return what both doors of kvdisk are told of the drive."""
    return {"store_dirs": str(place), "nvme_bytes": cap_bytes, "segment_bytes": segment_bytes(cap_bytes)}


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _await_http(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/", timeout=5):
                return
        except urllib.error.HTTPError:
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise EngineError(f"LMCache's server did not start; its log is {log}.")
