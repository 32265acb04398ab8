# SPDX-License-Identifier: Apache-2.0
"""Requests with a LoRA adapter: their blocks are known by what the adapter's files hold, not by its
name and path, as in vLLM's hashes."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvdisk.connector.adapter import hash_by_content
from kvdisk.connector.identity import digest_file
from kvdisk.errors import ConfigError, QuietLog

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger("kvdisk.connector")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM: its workers load the first that is there."""
_FILES_CLOCK = 5
"""CLOCK_REALTIME_COARSE, from which Linux takes the times of files: some ms behind the real one."""


class Adapters:
    """Knows adapters by their content. Scheduler thread only.

    The workers read an adapter's files when they like, and again when they had to drop it. So an
    adapter is known only while nothing of it has changed since this engine began: whatever they
    have read, and will read, is what is there. Its files are read once, and their status with each
    request.
    """

    def __init__(self, settings: LoRAConfig | None) -> None:
        self._settings = settings
        self._began_ns = time.clock_gettime_ns(_FILES_CLOCK)
        self._by_path: dict[str, str] = {}
        self._by_id: dict[int, str | None] = {}
        """What each of vLLM's numbers stands for: with another path it would not be read again."""
        self._log = QuietLog(time.monotonic, logger)

    def identify(self, request: Request) -> bool:
        """Make the hashes of a new request's blocks anew, of its adapter's content; False: that is
        not known, and nothing has changed."""
        adapter = request.lora_request
        try:
            content = self._content_of(adapter)
        except (OSError, RuntimeError, ValueError, ConfigError) as error:
            self._log.warn("adapter", f"requests with the adapter {adapter.lora_name} are left alone: {error}")
            content = None
        if content is None or self._by_id.setdefault(adapter.lora_int_id, content) != content:
            self._by_id[adapter.lora_int_id] = None
            return False
        hash_by_content(request, content)
        return True

    def _content_of(self, adapter: LoRARequest) -> str:
        """Return what an adapter is known by. Raises OSError, RuntimeError, ValueError,
        ConfigError."""
        assert self._settings is not None, "vLLM takes no adapter without its settings"
        folder = Path(adapter.lora_path).expanduser().absolute()
        weights = next((file for name in _WEIGHTS if (file := folder / name).is_file()), None)
        if weights is None:
            raise ValueError(f"{folder} is no directory with its files")
        files = [folder / _CONFIG, weights]
        if adapter.lora_path not in self._by_path:
            digest = hashlib.sha256(files[0].read_bytes())
            digest_file(weights, digest)
            self._by_path[adapter.lora_path] = digest.hexdigest()
        # Asked last, so that it is true of what was read.
        times_ns = [time_ns for path in (folder, *files) for time_ns in (path.stat().st_ctime_ns, *_link_times(path))]
        if max(times_ns) >= self._began_ns:
            raise ValueError(f"{folder} has changed since this engine began, until the next start")
        return f"{self._by_path[adapter.lora_path]} {adapter.is_3d_lora_weight} {self._settings.compute_hash()}"


def _link_times(path: Path) -> Iterator[int]:
    """Yield when each of the links that lead to a path was made (ns, by the file system)."""
    for step in (*path.parents, path):
        if step.is_symlink():
            yield step.lstat().st_ctime_ns
            yield from _link_times(step.parent / step.readlink())
