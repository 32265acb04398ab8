# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR --export FILE``: a row for each block, as CSV or Parquet.

Columns: home, namespace (fingerprint, hex), epoch, key (hex), group, segment, slot, drive, generation, parent (hex),
position (in its chain, from 0 on), tokens (of the block), bytes (of its slots, on all ranks), stored_s, uses and
last_use_s. Times are whole seconds since the Unix epoch. Empty (CSV) or null (Parquet): there is none, or it cannot be
known. A block that several homes have has a row for each.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.index_reader import ask_child
from kvdisk.cli.survey import index_namespaces
from kvdisk.device.control import HomeSummary
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.listing import list_homes
from kvdisk.errors import ConfigError

COLUMNS = (
    *("home", "namespace", "epoch", "key", "group", "segment", "slot", "drive", "generation", "parent", "position"),
    *("tokens", "bytes", "stored_s", "uses", "last_use_s"),
)
SUFFIXES = (".csv", ".parquet")
_ROWS_AT_ONCE = 65536

Table = dict[str, list[Any]]
"""Some rows: a list for each of COLUMNS, all of one length."""


class Exported(NamedTuple):
    """What was written, and of which homes nothing could be."""

    path: Path
    rows: int
    homes: int
    problems: tuple[str, ...]


def check_target(path: Path, *, force: bool) -> None:
    """Raise ConfigError where a file of that name cannot be written, before anything is read."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--export takes a file whose name ends with .csv or .parquet, not {path.name!r}")
    if path.is_dir() or (os.path.lexists(path) and not force):
        raise ConfigError(f"{path} exists; --force replaces it" if not path.is_dir() else f"{path} is a directory")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory")
    if path.suffix == ".parquet":
        _import_pyarrow()


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("a .parquet file needs pyarrow (pip install kvdisk[export]); .csv does not") from None
    return pyarrow


def export_blocks(directories: Directories, path: Path) -> Exported:
    """Write every block of the store in these directories; see the module. The file appears when it is complete.

    Raises OSError where it cannot be written; and as ``survey.survey_store``.
    """
    groups, namespaces = index_namespaces(list_homes(list_directories(directories)))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with tempfile.TemporaryDirectory(prefix="kvdisk-export-") as place:
        answers = ask_child(namespaces, {"what": "save", "target": place})
        problems = [
            f"home {home.id}: its index cannot be read ({answer})"
            for group, of_homes in zip(groups, answers.homes, strict=True)
            for home, answer in zip(group, of_homes, strict=True)
            if isinstance(answer, str)
        ]
        write = _write_csv if path.suffix == ".csv" else _write_parquet
        try:
            rows = write(temporary, _tables(groups, answers.namespaces, Path(place), problems.append))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    read = sum(isinstance(answer, list) for of_homes in answers.homes for answer in of_homes)
    return Exported(path, rows, read, tuple(problems))


def _tables(
    groups: Sequence[Sequence[HomeSummary]], names: Sequence[Any], place: Path, complain: Callable[[str], None]
) -> Iterator[Table]:
    from kvdisk.cli.block_rows import load_rows  # numpy, which needs time to load

    for homes, name in zip(groups, names, strict=True):
        if not (place / name).is_file():
            complain(name)  # a sentence
            continue
        rows = load_rows(place / name)
        record = homes[0].record
        for start in range(0, 0 if rows is None else len(rows.homes), _ROWS_AT_ONCE):
            yield _table(homes, record.fingerprint.hex() if record else None, rows, slice(start, start + _ROWS_AT_ONCE))


def _table(homes: Sequence[HomeSummary], namespace: str | None, rows: Any, part: slice) -> Table:
    from kvdisk.cli.block_rows import each_hex

    def known(column: Any, least: int = 0) -> list[int | None]:
        return [value if value >= least else None for value in column[part].tolist()]

    def hexes(joined: Any, lengths: Any) -> list[str]:
        start, end = int(lengths[: part.start].sum()), int(lengths[: part.stop].sum())
        return each_hex(joined[start:end], lengths[part])

    ids = [homes[number].id for number in rows.homes[part].tolist()]
    columns = (
        ids,
        [namespace] * len(ids),
        rows.epochs[part].tolist(),
        hexes(rows.keys, rows.key_bytes),
        rows.groups[part].tolist(),
        rows.segments[part].tolist(),
        rows.slots[part].tolist(),
        known(rows.drives),
        rows.generations[part].tolist(),
        [parent or None for parent in hexes(rows.parents, rows.parent_bytes)],
        known(rows.positions),
        known(rows.tokens),
        rows.bytes[part].tolist(),
        rows.stored_s[part].tolist(),
        known(rows.uses),
        known(rows.last_use_s, 1),
    )
    return dict(zip(COLUMNS, columns, strict=True))


def _write_csv(path: Path, tables: Iterator[Table]) -> int:
    rows = 0
    with path.open("x", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for table in tables:
            rows += len(table["home"])
            writer.writerows(zip(*table.values(), strict=True))
    return rows


def _write_parquet(path: Path, tables: Iterator[Table]) -> int:
    arrow = _import_pyarrow()
    text, number, unsigned = arrow.string(), arrow.int64(), arrow.uint64()
    types = {"home": text, "namespace": text, "key": text, "parent": text, "epoch": unsigned, "generation": unsigned}
    schema = arrow.schema([(name, types.get(name, number)) for name in COLUMNS])
    rows = 0
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            rows += len(table["home"])
            writer.write_table(arrow.table(table, schema=schema))
    return rows
