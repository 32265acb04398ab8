# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR --export FILE``: a row for each block, as CSV or Parquet.

Columns: engine_store, namespace (fingerprint, hex), epoch, key (hex), group, segment, slot, drive,
generation, parent (hex), position (in its chain, from 0 on), tokens (of the block), bytes (of its
slots, on all ranks), stored_s, uses and last_use_s. Times are whole seconds since the Unix epoch. A
cell is empty (CSV) or null (Parquet) where there is no value, or none that can be known. A block
that several engine stores hold has a row for each.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdisk.cli.indexes import NONE, ReadNamespace, Records, by_namespace, index_problems, read_homes
from kvdisk.cli.output import new_file
from kvdisk.cli.prefixes import Forest, grow_forest
from kvdisk.device.drives import Directories
from kvdisk.errors import ConfigError

COLUMNS = {
    "engine_store": "string",
    "namespace": "string",
    "epoch": "uint64",
    "key": "string",
    "group": "int64",
    "segment": "int64",
    "slot": "int64",
    "drive": "int64",
    "generation": "uint64",
    "parent": "string",
    "position": "int64",
    "tokens": "int64",
    "bytes": "int64",
    "stored_s": "int64",
    "uses": "int64",
    "last_use_s": "int64",
}
"""The columns, with their types in Parquet."""
SUFFIXES = (".csv", ".parquet")
_ROWS_AT_ONCE = 65536

Table = dict[str, list[Any]]
"""Some rows: a list for each of COLUMNS, all of one length."""


@dataclass(frozen=True)
class Exported:
    """What was written, and the problems of engine stores that could not be read; what ``--export
    --json`` prints."""

    path: Path
    bytes: int
    rows: int
    engine_stores: int
    problems: tuple[str, ...]


def export_blocks(directories: Directories, path: Path, *, force: bool) -> Exported:
    """Write every block of a store. The file appears when it is complete.

    ``force``: replace a file of that name. Raises ConfigError where the file cannot be written, and
    as ``survey.survey_store``.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--export takes a file whose name ends with .csv or .parquet, not {path.name!r}")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    if path.suffix == ".parquet":
        _import_pyarrow()
    homes = read_homes(directories)
    write = _write_csv if path.suffix == ".csv" else _write_parquet
    with new_file(path) as temporary:
        write(temporary, _tables(by_namespace(homes)))
    return Exported(
        path=path,
        bytes=path.stat().st_size,
        rows=sum(len(home.records) for home in homes),
        engine_stores=sum(home.index.blocks is not None for home in homes),
        problems=index_problems(homes),
    )


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("a .parquet file needs pyarrow (pip install pyarrow); .csv does not") from None
    return pyarrow


def _tables(namespaces: list[ReadNamespace]) -> Iterator[Table]:
    for namespace in namespaces:
        forest, count = grow_forest(namespace.blocks), len(namespace.places)
        for start in range(0, count, _ROWS_AT_ONCE):
            yield describe_rows(namespace, forest, range(start, min(count, start + _ROWS_AT_ONCE)))


def describe_rows(namespace: ReadNamespace, forest: Forest, rows: Sequence[int]) -> Table:
    """Return the columns of these rows of a namespace's blocks."""
    blocks, columns, at = namespace.blocks, namespace.blocks.columns, np.array(rows, np.int64)
    record, records, nodes = namespace.record, Records(columns), forest.node_of[at]
    uses = np.where(blocks.is_known, blocks.uses, NONE)
    return {
        "engine_store": [namespace.places[row][0].id for row in rows],
        "namespace": [record.fingerprint.hex() if record else None] * len(rows),
        "epoch": columns.epochs[at].tolist(),
        "key": [columns.keys[row].hex() for row in rows],
        "group": blocks.groups[at].tolist(),
        "segment": columns.segments[at].tolist(),
        "slot": columns.indices[at].tolist(),
        "drive": _known(blocks.drives[at]),
        "generation": columns.generations[at].tolist(),
        "parent": [(records[row].parent or b"").hex() or None for row in rows],
        "position": _known(np.where(forest.is_whole[nodes], forest.depths[nodes], NONE)),
        "tokens": _known(blocks.tokens[at]),
        "bytes": blocks.slot_bytes[at].tolist(),
        "stored_s": columns.stored_s[at].tolist(),
        "uses": _known(uses[at]),
        "last_use_s": _known(blocks.last_use_s[at], least=1),
    }


def _known(column: NDArray[np.int64], least: int = 0) -> list[int | None]:
    return [value if value >= least else None for value in column.tolist()]


def _write_csv(path: Path, tables: Iterable[Table]) -> None:
    with path.open("x", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for table in tables:
            writer.writerows(zip(*table.values(), strict=True))


def _write_parquet(path: Path, tables: Iterable[Table]) -> None:
    arrow = _import_pyarrow()
    schema = arrow.schema(COLUMNS.items())
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(arrow.table(table, schema=schema))
