# SPDX-License-Identifier: Apache-2.0
"""What ``run_week`` measures of a process, and whether any of it has grown."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from kvdisk.manager import bounds, chances

_PLAIN = (int, float, str, bytes, bool, type(None), Enum, range, Path)
_BUFFERS = (bytearray, memoryview, array, np.ndarray)
_CONTAINERS = (dict, list, set, frozenset, deque, tuple)
MEMORY_SLACK = 8 << 20
COUNT_SLACK = 256
GROWTH = 1.15
"""What the last day's median may be, as a multiple of the most of the second day, and so much more:
of bytes MEMORY_SLACK, of others COUNT_SLACK."""
SPARE = frozenset({"catalog.Catalog._vacant"})
"""Room that a table keeps: it grows as the table gets emptier. The whole table is counted anyway,
by its columns."""
BOUNDED = {
    "chances.Chances._past[]": (bounds.COUNTS + 1) * chances.CLASSES,
    "chances.Chances._old[]": (chances.OLD_COUNTS + 2) * 2 * chances.CLASSES * chances.BUCKETS,
}
"""What a list has when it is full. It may take longer than two days to be."""


def sizes_of(*roots: object) -> dict[str, int]:
    """Return how much is in every container that can be reached from ``roots`` through objects of
    kvdisk, by the class and attribute that it is reached from: of buffers and arrays their length.

    It knows no class: a structure that is new is counted. Containers within others count as
    ``Class.attribute[]``, all together.
    """
    found: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque(("", root) for root in roots)
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _BUFFERS):
            found[name] += len(value) if not isinstance(value, np.ndarray) else value.size
        elif isinstance(value, _CONTAINERS):
            items = _items(value)
            if not isinstance(value, tuple):
                found[name] += len(value)
            inner = name if name.endswith("[]") else f"{name}[]"
            waiting.extend((inner, item) for item in items if not isinstance(item, _PLAIN))
        elif _is_ours(type(value)):
            waiting.extend((f"{_name_of(type(value))}.{at}", each) for at, each in _attributes(value))
        elif (function := getattr(value, "__self__", None)) is not None:
            waiting.append((name, function))
    return dict(found)


def module_sizes() -> dict[str, int]:
    """Return the same of what modules of kvdisk and their classes hold, caches of functions
    included."""
    found: dict[str, int] = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("kvdisk."):
            continue
        owners: list[tuple[str, Mapping[str, Any]]] = [(module_name, vars(module))]
        owners += [
            (f"{module_name}.{key}", vars(each))
            for key, each in list(vars(module).items())
            if _is_in(each, module_name)
        ]
        for owner, values in owners:
            for key, value in list(values.items()):
                if isinstance(value, dict | list | set | deque | bytearray):
                    found[f"{owner}.{key}"] = len(value)
                elif callable(info := getattr(value, "cache_info", None)):
                    found[f"{owner}.{key}()"] = info().currsize
    return found


def _is_in(value: object, module_name: str) -> bool:
    return isinstance(value, type) and value.__module__ == module_name


def _items(value: Any) -> list[Any]:
    """Return a container's items; another thread may change it meanwhile."""
    while True:
        try:
            return [*value.values(), *value.keys()] if isinstance(value, dict) else list(value)
        except RuntimeError:
            continue


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "kvdisk"


def _name_of(kind: type) -> str:
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_private = name.startswith("__") and not name.endswith("__")
            real = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if hasattr(value, real):
                yield real, getattr(value, real)


def resident_bytes(pid: int | str = "self") -> int:
    """Return a process's anonymous resident memory; of this one, when freed memory was given back;
    of one that was just killed, 0."""
    if pid == "self":
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0) * 1024


def open_files() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def lmdb_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of an index's file, allocated, and its pages: the last one that was ever
    used, those of its tables, and its records."""
    status = (path / "data.mdb").stat()
    with lmdb.open(str(path), readonly=True, max_dbs=8) as environment, environment.begin() as view:
        pages = records = 0
        names = [bytes(key) for key, _ in view.cursor()]
        for name in names:
            table = view.stat(environment.open_db(name, view, create=False))
            pages += table["branch_pages"] + table["leaf_pages"] + table["overflow_pages"]
            records += table["entries"]
        last = environment.info()["last_pgno"]
    return {"file bytes": status.st_blocks * 512, "last page": last, "pages": pages, "records": records}


# -- the check ---------------------------------------------------------------------------------


class Series(NamedTuple):
    """A figure of each hour: the most it was on the second day, its median on the last, and the
    most it was at all."""

    name: str
    second: float
    last: float
    most: float
    is_bytes: bool = False

    @property
    def has_grown(self) -> bool:
        """Whether the last day has more than the second one allows."""
        if self.name in SPARE or self.most <= BOUNDED.get(self.name, -1):
            return False
        return self.last > self.second * GROWTH + (MEMORY_SLACK if self.is_bytes else COUNT_SLACK)


def series_of(samples: Sequence[Mapping[str, Any]], kind: str, *, is_bytes: bool = False) -> list[Series]:
    """Return the figures of a kind, from samples of at least three days, each with its ``day``. One
    that is missing in a sample was 0."""
    last_day = max(sample["day"] for sample in samples)
    assert last_day >= 2, "the second day and the last must differ"
    found = []
    for name in sorted({name for sample in samples for name in sample[kind]}):
        second, last = max(_of(samples, kind, name, 1)), statistics.median(_of(samples, kind, name, last_day))
        found.append(Series(name, second, last, max(sample[kind].get(name, 0) for sample in samples), is_bytes))
    return found


def _of(samples: Iterable[Mapping[str, Any]], kind: str, name: str, day: int) -> list[float]:
    return [sample[kind].get(name, 0) for sample in samples if sample["day"] == day]
