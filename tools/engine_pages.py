# SPDX-License-Identifier: Apache-2.0
"""One storage backend of another engine's, in a process of its own: an act of ``demo_engines.py``.

That runs it in the environment of the engine, with an order as JSON:

    python tools/engine_pages.py '{"backend": "sglang-file", "act": "store", "pages": 8, ...}'

The backends are made by the engines' own factories, over their own memory. The number of a page
says its bytes. What the act found is written to the file that the order names.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import connectors
import numpy as np

BATCH = 32
"""Pages that memory has room for: as many go into one call."""
COMMIT_S = 2.0
"""How long a store has before its process is killed: by default kvdisk commits every 50 ms."""
PAGE_TOKENS = 256
OBJECT_BYTES = 1 << 20
SEGMENT_BYTES = 16 << 20
STORE_CAP_BYTES = 1 << 30
"""kvdisk's cap where it is not to be met."""


@dataclass(frozen=True)
class Order:
    """What one process does. ``act``: one of ``ACTS``. ``folder``: where the backend keeps its
    pages. ``cap_bytes``: kvdisk's, which is to be met. ``answer``: the file for what was found."""

    backend: str
    act: str
    folder: Path
    pages: int
    cap_bytes: int
    answer: Path

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of kvdisk beside the directory."""
        return {
            "nvme_bytes": self.cap_bytes or STORE_CAP_BYTES,
            "nvme_admission": "all",
            "segment_bytes": SEGMENT_BYTES,
        }


class Pages(ABC):
    """A backend that stores and loads up to BATCH pages at a time, by number. All have
    ``page_bytes``."""

    page_bytes: int

    def content(self, number: int) -> np.ndarray:
        """Return the bytes of a page."""
        return np.random.default_rng(number).integers(0, 256, self.page_bytes, np.uint8)

    @abstractmethod
    def store(self, numbers: range) -> None:
        """Fill memory with pages, and store them, as far as the backend takes them."""

    @abstractmethod
    def found(self, numbers: range) -> int:
        """Return how many of the pages a lookup finds."""

    @abstractmethod
    def load(self, numbers: range) -> list[np.ndarray | None]:
        """Load pages into memory that was filled with something else; None: it did not come."""

    @abstractmethod
    def close(self) -> None:
        """End the backend as its engine does."""


class SglangPages(Pages):
    """SGLang's factory and host pool, without a GPU: see ``tests/hicache``."""

    def __init__(self, order: Order, kind: str) -> None:
        from hicache.backends import Backend, be_patient, key_of, write_model

        be_patient()
        self._key_of = key_of
        model = write_model(order.folder.with_name("model"))
        own: dict[str, Any] = order.settings if kind == "dynamic" else {"tensors": True}
        self._backend = Backend(model, order.folder, kind=kind, pages=BATCH, page=PAGE_TOKENS, **own)
        self.page_bytes = len(self._backend.bytes_of(0))

    def _keys(self, numbers: range) -> list[str]:
        return [self._key_of(number) for number in numbers]

    def _fill(self, page: int, content: np.ndarray) -> None:
        import torch

        pool = self._backend.pool
        pool.set_from_flat_data_page(page * PAGE_TOKENS, torch.from_numpy(content).view(pool.dtype))

    def store(self, numbers: range) -> None:
        for page, number in enumerate(numbers):
            self._fill(page, self.content(number))
        self._backend.store(self._keys(numbers))

    def found(self, numbers: range) -> int:
        return self._backend.exists(self._keys(numbers))

    def load(self, numbers: range) -> list[np.ndarray | None]:
        for page in range(len(numbers)):
            self._fill(page, np.zeros(self.page_bytes, np.uint8))
        came = self._backend.load(self._keys(numbers))
        pages = [np.frombuffer(self._backend.bytes_of(page), np.uint8) for page in range(len(numbers))]
        return [page if has_come else None for page, has_come in zip(pages, came, strict=True)]

    def close(self) -> None:
        self._backend.close()


class LmcachePages(Pages):
    """LMCache's factory and memory objects: see ``tests/l2adapter``."""

    def __init__(self, order: Order, kind: str) -> None:
        import bench_lmcache
        from l2adapter import adapters

        self._adapters = adapters
        order.folder.mkdir(parents=True, exist_ok=True)
        option = bench_lmcache.option_for(kind, order.folder, **order.settings)
        self._driver = adapters.Driver(option, adapters.Arena(BATCH * OBJECT_BYTES))
        if kind == "kvdisk":
            self._driver.wait_known()
        self.page_bytes = OBJECT_BYTES

    def _keys(self, numbers: range) -> list[Any]:
        return [self._adapters.key_of(number, name="bench-model") for number in numbers]

    def store(self, numbers: range) -> None:
        self._driver.arena.reset()
        objects = [self._driver.arena.make(OBJECT_BYTES) for _ in numbers]
        for each, number in zip(objects, numbers, strict=True):
            self._adapters.bytes_of(each)[:] = self.content(number)
        self._driver.store(self._keys(numbers), objects)

    def found(self, numbers: range) -> int:
        return self._driver.look_up(self._keys(numbers), {0: OBJECT_BYTES}).count(True)

    def load(self, numbers: range) -> list[np.ndarray | None]:
        self._driver.arena.reset()
        objects = [self._driver.arena.make(OBJECT_BYTES) for _ in numbers]
        came = self._driver.load(self._keys(numbers), objects)
        return [
            self._adapters.bytes_of(each) if has_come else None for each, has_come in zip(objects, came, strict=True)
        ]

    def close(self) -> None:
        self._driver.close()


BACKENDS: dict[str, Callable[[Order], Pages]] = {
    "sglang-kvdisk": lambda order: SglangPages(order, "dynamic"),
    "sglang-file": lambda order: SglangPages(order, "file"),
    "lmcache-kvdisk": lambda order: LmcachePages(order, "kvdisk"),
    "lmcache-fs_native": lambda order: LmcachePages(order, "fs_native"),
}


def batches_of(pages: int) -> Iterator[range]:
    """Yield the numbers of so many pages, batch by batch."""
    for start in range(0, pages, BATCH):
        yield range(start, min(pages, start + BATCH))


def store_and_wait(order: Order) -> dict[str, Any]:
    """Store all pages; then there is time to commit them. The process is to be killed."""
    pages = BACKENDS[order.backend](order)
    for batch in batches_of(order.pages):
        pages.store(batch)
    time.sleep(COMMIT_S)
    return {
        "page_bytes": pages.page_bytes,
        "heads": [pages.content(at)[:32].tobytes().hex() for at in range(order.pages)],
    }


def load_all(order: Order) -> dict[str, Any]:
    """Look all pages up, load all, and compare each byte of what came."""
    pages = BACKENDS[order.backend](order)
    found = loaded = wrong = 0
    for batch in batches_of(order.pages):
        found += pages.found(batch)
        for number, page in zip(batch, pages.load(batch), strict=True):
            loaded += page is not None
            wrong += page is not None and not np.array_equal(page, pages.content(number))
    pages.close()
    return {"found": found, "loaded": loaded, "wrong": wrong}


def load_and_write(order: Order) -> dict[str, Any]:
    """The same; then store one and a half times kvdisk's cap elsewhere. Return also the most that
    this took of the drive."""
    found = load_all(replace(order, cap_bytes=0))
    order = replace(order, folder=order.folder.with_name(f"{order.folder.name}-capped"))
    pages, most_bytes = BACKENDS[order.backend](order), 0
    for batch in batches_of(int(1.5 * order.cap_bytes / pages.page_bytes)):
        pages.store(batch)
        most_bytes = max(most_bytes, connectors.taken_bytes(order.folder))
    pages.close()
    return found | {"most_bytes": most_bytes}


ACTS = {"store": store_and_wait, "load": load_all, "load and write": load_and_write}


def main(text: str) -> None:
    told = json.loads(text)
    order = Order(**told | {name: Path(told[name]) for name in ("folder", "answer")})
    if order.backend.startswith("sglang"):
        import hicache  # noqa: F401 - before anything of SGLang
    found = ACTS[order.act](order)
    beside = order.answer.with_suffix(".new")
    beside.write_text(json.dumps(found))
    beside.replace(order.answer)
    if order.act == "store":
        time.sleep(3600)  # until it is killed


if __name__ == "__main__":
    main(sys.argv[1])
