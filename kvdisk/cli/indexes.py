# SPDX-License-Identifier: Apache-2.0
"""Reads the engine stores of a store for every command: what there is, its index, and its USES, in
columns.

A process of its own reads the indexes: see ``kvdisk.index.reader_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES, BlockKey, Slot
from kvdisk.cli.output import engine_store
from kvdisk.device import paths
from kvdisk.device.control import HomeRecord, HomeSummary, home_ids, read_record
from kvdisk.device.drives import Directories
from kvdisk.device.listing import list_homes
from kvdisk.device.segment import DriveFolder
from kvdisk.device.store import Store
from kvdisk.device.uses import USES_RECORD, UsesRecords, find_uses, read_uses
from kvdisk.errors import ConfigError, CorruptRecord
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.reader_process import IndexContent, read_indexes

NONE = -1
NOT_NAMED = "was not looked at"
GUEST = "it has files of ranks on this host, and their index is on the host of their engine's scheduler"
_MOST_RANKS = 1 << 16
_MOST_TOKENS = 1 << 20
_EPOCH_BITS, _KIND_BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
"""Odd numbers, which spread epochs and kinds over 64 bits."""


class Records:
    """The blocks of an index as records; each is made from ``columns`` when it is asked for."""

    def __init__(self, blocks: BlockColumns | None) -> None:
        self.columns = blocks or join_columns([])
        self._parent_ends = np.cumsum(self.columns.parent_bytes)

    def __len__(self) -> int:
        return len(self.columns.keys)

    def __getitem__(self, row: int) -> BlockRecord:
        blocks, end = self.columns, int(self._parent_ends[row])
        parent = blocks.parents[end - int(blocks.parent_bytes[row]) : end]
        return BlockRecord(
            int(blocks.epochs[row]),
            blocks.keys[row],
            Slot(int(blocks.segments[row]), int(blocks.indices[row])),
            int(blocks.generations[row]),
            BlockKey(parent) if parent else None,
            int(blocks.stored_s[row]),
            int(blocks.tenants[row]),
        )


class HomeColumns(NamedTuple):
    """Blocks of one engine store, or of several one after the other, one row each.

    ``names``: 64 bits of a block's epoch and hash, without its KV-cache group. ``above``: those of
    its parent, 0 where it has none. Two of ten million blocks share a name with a probability of 1
    in 300,000; then two chains would look like one. ``tokens``: of the block, NONE where HOME does
    not say. ``slot_bytes``: on all ranks; 0, and ``drives`` NONE, in a segment that the index does
    not have. ``uses`` and ``last_use_s``: 0 where ``is_known`` says that USES does not have the
    block.
    """

    columns: BlockColumns
    names: NDArray[np.uint64]
    above: NDArray[np.uint64]
    groups: NDArray[np.int64]
    tokens: NDArray[np.int64]
    slot_bytes: NDArray[np.int64]
    drives: NDArray[np.int64]
    uses: NDArray[np.int64]
    last_use_s: NDArray[np.int64]
    is_known: NDArray[np.bool_]

    @property
    def parents(self) -> NDArray[np.int64]:
        """The row of each block's parent in the same KV-cache group, or NONE."""
        first_rows, _, parents = self.identify(self.groups)
        return np.where(parents == NONE, NONE, first_rows[parents])

    def identify(self, kinds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Number the blocks in the order of rows: blocks of the same name and kind have one number.

        Returns the first row of each number, the number of each row, and the number of each row's
        parent or NONE.
        """
        kind_bits = kinds.astype(np.uint64) * _KIND_BITS
        above = self.above + kind_bits
        names, first_rows, at = np.unique(self.names + kind_bits, return_index=True, return_inverse=True)
        in_order = np.argsort(first_rows)
        numbers = np.empty_like(in_order)
        numbers[in_order] = np.arange(len(in_order))
        above_at = np.searchsorted(names, above).clip(max=len(names) - 1)
        is_here = (self.above != 0) & (names[above_at] == above)
        return first_rows[in_order], numbers[at], np.where(is_here, numbers[above_at], NONE)


@dataclass(frozen=True)
class ReadHome:
    """An engine store and its index."""

    summary: HomeSummary
    index: IndexContent

    @property
    def id(self) -> str:
        """The engine store's id."""
        return self.summary.id

    @property
    def is_guest(self) -> bool:
        """Whether it has files of ranks, and its index is on the host of their engine."""
        return self.summary.record is not None and self.summary.record.guest

    @property
    def is_spread(self) -> bool:
        """Whether files of some ranks may be on other hosts."""
        return self.summary.record is not None and self.summary.record.is_spread

    @property
    def problem(self) -> str | None:
        """Why the index cannot be read; None where it can, or is not here. One that has neither
        files nor an index is new."""
        if self.is_guest:
            return None
        if self.index.problem is not None:
            return f"its index cannot be read ({self.index.problem}); {self.remedy} rebuilds it"
        is_missing = self.summary.segments and not self.index.exists
        return f"its index is missing; {self.remedy} rebuilds it" if is_missing else None

    @property
    def remedy(self) -> str:
        """What rebuilds a damaged index, in words."""
        return "a restart of its engine" if self.summary.alive else "kvdisk repair"

    @property
    def ranks(self) -> int:
        """Shards of a block on the drive: as HOME says, otherwise as many ranks as have files."""
        ranks = described_geometry(self.summary.record).get("ranks")
        if isinstance(ranks, int) and 0 < ranks <= _MOST_RANKS:
            return ranks
        return max(1, len({file.rank for file in self.summary.segments}))

    @cached_property
    def records(self) -> Records:
        """The blocks of the index; none where it cannot be read."""
        return Records(self.index.blocks)

    @cached_property
    def blocks(self) -> HomeColumns | None:
        """The blocks with their uses; None where the index cannot be read."""
        if self.problem is not None:
            return None
        tokens, uses = block_tokens(self.summary.record), read_uses(self.summary.path)
        return join_home(self.records.columns, self.index.segments, self.ranks, tokens, uses)

    def folder(self, drive: int) -> DriveFolder | None:
        """Return its part on a drive; None where that directory was not named."""
        return self.summary.folders[drive] if drive < len(self.summary.folders) else None


@dataclass(frozen=True)
class ReadNamespace:
    """The engine stores of one namespace. ``id``: the fingerprint in hex. An engine store whose
    HOME cannot be read is alone, by its own id."""

    id: str
    engine_stores: tuple[ReadHome, ...] = field(compare=False)

    @property
    def record(self) -> HomeRecord | None:
        """The HOME of the engine store that was used last."""
        return max((home.summary.record for home in self.engine_stores), key=lambda one: one.last_use_s if one else 0)

    @cached_property
    def blocks(self) -> HomeColumns:
        """The blocks of all engine stores whose index can be read."""
        return join([home.blocks for home in self.engine_stores if home.blocks is not None])

    @cached_property
    def places(self) -> list[tuple[ReadHome, int]]:
        """The engine store of each row of ``blocks``, and the row there."""
        return [(home, row) for home in self.engine_stores if home.problem is None for row in range(len(home.records))]


def read_homes(
    directories: Directories, wanted: Callable[[HomeSummary], bool] = lambda _: True, *, guests: bool = False
) -> list[ReadHome]:
    """Read the wanted engine stores of a store, by id; ``guests``: those without an index, too.
    Raises as ``list_homes``."""
    found = [home for home in list_homes(directories) if guests or home.record is None or not home.record.guest]
    summaries = list(filter(wanted, found))
    indexes = read_indexes([summary.index_path for summary in summaries])
    return [ReadHome(*each) for each in zip(summaries, indexes, strict=True)]


def find_home(directories: Sequence[Path], wanted: str | None) -> str | None:
    """Return the id of the engine store that begins with ``wanted``; None where ``wanted`` is None.
    Raises ConfigError where there is none, or more than one, and as ``list_homes``."""
    store = Store.open(directories, create=False)
    with paths.device_errors(f"reading {store.path}"):
        ids = home_ids(store.path)
    if wanted is None:
        return None
    found = [one for one in ids if wanted and one.startswith(wanted.lower())]
    if not found:
        raise ConfigError(f"there is no engine store {wanted}; kvdisk inspect --stores lists them")
    if len(found) > 1:
        raise ConfigError(f"{wanted} begins more than one engine store: {', '.join(one[:12] for one in found)}")
    return found[0]


def index_problems(homes: Iterable[ReadHome]) -> tuple[str, ...]:
    """Return a sentence for each index that cannot be read, with the reason."""
    return tuple(f"{engine_store(home.id)}: {home.problem}" for home in homes if home.problem)


def by_namespace(homes: Sequence[ReadHome]) -> list[ReadNamespace]:
    """Group engine stores that serve the same requests."""
    groups: dict[str, list[ReadHome]] = {}
    for home in homes:
        record = home.summary.record
        groups.setdefault(record.fingerprint.hex() if record else home.id, []).append(home)
    return [ReadNamespace(name, tuple(group)) for name, group in groups.items()]


def find_namespace(homes: Sequence[ReadHome], wanted: str) -> ReadNamespace:
    """Return the namespace whose model has this name, or whose fingerprint or model begins with it.

    Raises ConfigError where there is none, or more than one.
    """
    wanted = wanted.lower().strip("/")
    models = {one: str(one.record.description.get("model")) for one in by_namespace(homes) if one.record is not None}
    found = [one for one, model in models.items() if wanted and f"/{model.lower()}".endswith(f"/{wanted}")]
    if wanted and not found:
        for one, model in models.items():
            names = (one.id, model.lower(), model.lower().rstrip("/").rpartition("/")[2])
            found += [one] if any(name.startswith(wanted) for name in names) else []
    if not found:
        raise ConfigError(f"no namespace of this store begins with, or is of a model named, {wanted}.")
    if len(found) > 1:
        listed = ", ".join(sorted(f"{one.id[:12]} ({models[one]})" for one in found))
        raise ConfigError(f"{wanted} stands for more than one namespace: {listed}.")
    return found[0]


def why_no_record(path: Path) -> str | None:
    """Say why HOME of the engine store in this directory cannot be read; None where it can."""
    try:
        read_record(path)
    except FileNotFoundError:
        return "its HOME file is missing, as after an interrupted deletion; the next engine that starts removes it"
    except CorruptRecord as error:
        return f"its HOME file cannot be read ({str(error).replace(f'{path}/', '')}); kvdisk clear removes it"
    except OSError as error:
        return f"its HOME file cannot be read ({error.strerror})"
    return None


def not_named(drive: int) -> str:
    """Return a sentence that says that a directory of the store is missing among the arguments."""
    return f"drive {drive} {NOT_NAMED}, name its directory too"


def described_geometry(record: HomeRecord | None) -> dict[str, object]:
    """Return what HOME says of blocks; nothing in it can be relied on."""
    description = record.description if record else {}
    geometry = description.get("geometry")
    return geometry if isinstance(geometry, dict) else description


def block_tokens(record: HomeRecord | None) -> list[int]:
    """Return the tokens of a block of each KV-cache group, as HOME says; NONE where it does not."""
    groups = described_geometry(record).get("groups")
    if not isinstance(groups, list):
        return []
    sizes = [group.get("block_tokens") if isinstance(group, dict) else None for group in groups]
    return [size if isinstance(size, int) and 0 < size <= _MOST_TOKENS else NONE for size in sizes]


def join_home(
    columns: BlockColumns,
    segments: Sequence[SegmentRecord],
    ranks: int,
    tokens: Sequence[int],
    uses: UsesRecords | None,
) -> HomeColumns:
    """Return the columns of an engine store, from its index, HOME and USES. ``tokens``: of a block,
    by KV-cache group."""
    groups = np.frombuffer(b"".join([key[-GROUP_BYTES:] for key in columns.keys]), ">u2").astype(np.int64)
    names, above = (
        np.array([hash(key[:-GROUP_BYTES]) for key in keys], np.int64).view(np.uint64) + columns.epochs * _EPOCH_BITS
        for keys in (columns.keys, columns.each_parent())
    )
    found, is_known = find_uses(np.zeros(0, USES_RECORD) if uses is None else uses, columns.generations)
    return HomeColumns(
        columns,
        names,
        np.where(columns.parent_bytes == 0, np.uint64(0), above),
        groups,
        np.array([*tokens, NONE])[np.minimum(groups, len(tokens))],
        of_segments(columns.segments, {each.segment: min(each.slot_bytes, 1 << 48) for each in segments}, 0) * ranks,
        of_segments(columns.segments, {each.segment: each.drive for each in segments}, NONE),
        found["uses"].astype(np.int64),
        found["last_use_s"].astype(np.int64),
        is_known,
    )


def join(homes: Sequence[HomeColumns]) -> HomeColumns:
    """Return the blocks of engine stores, one after the other."""
    columns = join_columns([home.columns for home in homes])
    if not homes:
        return join_home(columns, (), 1, (), None)
    return HomeColumns(columns, *map(np.concatenate, zip(*(home[1:] for home in homes), strict=True)))


def of_segments(numbers: NDArray[np.uint32], values: Mapping[int, int], missing: int) -> NDArray[np.int64]:
    """Return the value of each segment number; ``missing`` for those that have none."""
    found, at = np.unique(numbers, return_inverse=True)
    of_found: NDArray[np.int64] = np.array([values.get(number, missing) for number in found.tolist()], np.int64)
    return of_found[at]


def places_of(columns: BlockColumns) -> NDArray[np.uint64]:
    """Return segment and slot of each block as one number."""
    return columns.segments.astype(np.uint64) << np.uint64(32) | columns.indices.astype(np.uint64)
