# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR KEY``: one block with its record, its slots on every rank, and its chain.

``FoundKey`` is what ``--json`` prints; its head is that of ``survey.Survey``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk.blocks import GROUP_BYTES, group_of
from kvdisk.cli.export import describe_rows
from kvdisk.cli.indexes import NONE, HomeColumns, ReadHome, ReadNamespace, by_namespace, read_homes
from kvdisk.cli.output import (
    ID_LETTERS,
    ago,
    engine_store,
    folded,
    left,
    make_lines,
    make_table,
    number,
    plural,
    print_list,
    printable,
)
from kvdisk.cli.prefixes import Forest, grow_forest
from kvdisk.cli.verify import Part, read_part
from kvdisk.device import paths
from kvdisk.device.drives import Directories
from kvdisk.device.header import read_header
from kvdisk.device.rebuild import HomeShape
from kvdisk.errors import ConfigError, CorruptRecord, KvdiskError
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import SegmentRecord

CHAIN_SHOWN = 2
_NAME_LETTERS = 16
MOST_NAMED = 5
"""Hashes that are named at most where several keys have the beginning that was given."""
_ATTEMPTS = 3
_CHECKSUM_KINDS = {1: "xxh3_128", 2: "multilinear"}


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A rank's slot of a copy. ``offset``: the slot's offset in the file.

    ``problems``: sentences; empty where a load would accept the slot. ``header``: null where it
    cannot be read; otherwise key, parent, generation, epoch, fingerprint, rank, rank_count,
    payload_bytes, checksum_kind, checksum.
    """

    rank: int
    file: Path | None
    offset: int | None
    problems: tuple[str, ...]
    header: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block of one namespace and epoch.

    ``position``, ``start_tokens``: blocks and tokens before it in its chain; null where the chain's
    head is not here. ``children``: how many blocks follow it directly. ``chain``: hashes of the
    blocks up to this one, the head first. ``copies``: for each engine store a row of ``--export``
    with ``owner`` ("alive" or "stopped") and ``ranks``, a ``RankSlot`` for each rank;
    ``last_use_s``: 0 where it was never used.
    """

    fingerprint: str | None
    model: Any
    epoch: int
    key: str
    group: int
    block_tokens: int | None
    position: int | None
    start_tokens: int | None
    children: int
    chain: tuple[str, ...]
    copies: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class FoundKey:
    """The blocks of a store whose key begins with ``key``: one hash, in one or more namespaces,
    epochs and engine stores.

    ``key``: as it was given. ``groups``: all KV-cache groups that have a block of this hash.
    ``blocks``: those of the lowest group, or of the group in ``key``.
    """

    surveyed_s: int
    ok: bool
    problems: tuple[str, ...]
    key: str
    groups: tuple[int, ...]
    blocks: tuple[FoundBlock, ...]


def survey_block(directories: Directories, wanted: str) -> FoundKey:
    """Return the blocks of a store whose key begins with ``wanted`` (lower-case hex).

    Raises ConfigError where there is none, or where several hashes begin so; and as
    ``survey.survey_store``.
    """
    for _ in range(_ATTEMPTS):
        found = _survey(directories, wanted)
        if found.ok or all(copy["owner"] == "stopped" for block in found.blocks for copy in block.copies):
            break  # else an owner may have given the slot to another block meanwhile: look again
    return found


def _survey(directories: Directories, wanted: str) -> FoundKey:
    homes = read_homes(directories)
    found = [(namespace, _rows(namespace, wanted)) for namespace in by_namespace(homes)]
    keys = {namespace.blocks.columns.keys[row] for namespace, rows in found for row in rows}
    hashes = sorted({key[:-GROUP_BYTES].hex() for key in keys})
    if len(hashes) > 1:
        named = ", ".join(f"{name[: len(wanted) + 8]}…" for name in hashes[:MOST_NAMED])
        raise ConfigError(f"{len(hashes)} blocks have a key that begins with {wanted} ({named}); give more digits")
    if not hashes:
        stores, namespaces = [home.id for home in homes], [namespace.id for namespace, _ in found]
        for kind, ids in ("an engine store", stores), ("a namespace", namespaces):
            if any(one.startswith(wanted) for one in ids):
                raise ConfigError(f"{wanted} is {kind}, and no block; --stores shows all of them")
        unread = sum(home.problem is not None for home in homes)
        without = f" ({unread} of its indexes cannot be read)" if unread else ""
        raise ConfigError(f"no block of this store has a key that begins with {wanted}{without}")
    groups = tuple(sorted(set(map(group_of, keys))))
    blocks = tuple(block for namespace, rows in found if rows for block in _blocks(namespace, rows, groups[0]))
    problems = tuple(
        f"{engine_store(copy['engine_store'])}: rank {rank.rank}: {problem}"
        for block in blocks
        for copy in block.copies
        for rank in copy["ranks"]
        for problem in rank.problems
    )
    return FoundKey(int(time.time()), not problems, problems, wanted, groups, blocks)


def _rows(namespace: ReadNamespace, wanted: str) -> list[int]:
    """Return the rows whose keys begin with ``wanted``."""
    whole = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
    keys = namespace.blocks.columns.keys
    return [row for row, key in enumerate(keys) if key.startswith(whole) and key.hex().startswith(wanted)]


def _blocks(namespace: ReadNamespace, rows: Sequence[int], group: int) -> Iterator[FoundBlock]:
    """Yield a block for each epoch that has one in these rows, of this KV-cache group."""
    record, forest = namespace.record, grow_forest(namespace.blocks)
    table = describe_rows(namespace, forest, rows)
    by_epoch: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for row, values in zip(rows, zip(*table.values(), strict=True), strict=True):
        said = dict(zip(table, values, strict=True))
        if said["group"] == group:
            by_epoch.setdefault(said["epoch"], []).append((row, said))
    for epoch, found in sorted(by_epoch.items()):
        row, said = found[0]
        node, tokens, position = int(forest.node_of[row]), said["tokens"], said["position"]
        yield FoundBlock(
            fingerprint=said["namespace"],
            model=record.description.get("model") if record else None,
            epoch=epoch,
            key=said["key"],
            group=group,
            block_tokens=tokens,
            position=position,
            start_tokens=None if tokens is None or position is None else position * tokens,
            children=int(np.count_nonzero(forest.parents == node)),
            chain=tuple(_chain(namespace.blocks, forest, node)),
            copies=tuple(_copy(namespace, *each) for each in found),
        )


def _chain(blocks: HomeColumns, forest: Forest, node: int) -> list[str]:
    """Return the hashes of the chain up to a block, the head first."""
    chain = []
    while node != NONE:
        chain.append(blocks.columns.keys[int(forest.first_rows[node])][:-GROUP_BYTES].hex())
        node = int(forest.parents[node])
    return chain[::-1]


# -- slots -------------------------------------------------------------------------------------


def _copy(namespace: ReadNamespace, row: int, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the copy in this row with its slot on every rank."""
    read, at = namespace.places[row]
    segment = next((one for one in read.index.segments if one.segment == said["segment"]), None)
    return {
        **said,
        "owner": "alive" if read.summary.alive else "stopped",
        "last_use_s": None if said["uses"] is None else said["last_use_s"] or 0,
        "ranks": tuple(_rank_slot(read, segment, at, rank) for rank in range(read.ranks)),
    }


def _rank_slot(read: ReadHome, segment: SegmentRecord | None, row: int, rank: int) -> RankSlot:
    slot, record = read.records[row].slot, read.summary.record
    if segment is None:
        return RankSlot(rank, None, None, (f"the index has no segment {slot.segment}",))
    offset = slot_offset(segment.slot_bytes, slot.index)
    try:
        if record is None:
            raise CorruptRecord("HOME cannot be read")
        part = Part(read, HomeShape.of(record.fingerprint, record.description), segment, rank, [row])
    except CorruptRecord as error:
        return RankSlot(rank, None, offset, (str(error),))
    found, path = read_part(part), part.path
    problems = (found.failed,) if found.failed else tuple(one.what for one in found.wrong)
    return RankSlot(rank, path, offset, problems, None if path is None else _header(path, offset))


def _header(path: Path, offset: int) -> dict[str, Any] | None:
    """Return what a slot's header says; None where it cannot be read."""
    try:
        with os.fdopen(paths.open_own(path, os.O_RDONLY), "rb") as file:
            file.seek(offset)
            header = read_header(memoryview(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0")))
    except (OSError, ValueError, KvdiskError):
        return None
    names = ("key", "parent", "generation", "rank", "rank_count", "payload_bytes", "checksum_kind", "checksum")
    found = header._asdict() | header.identity._asdict()
    return {name: found[name] for name in names} | header.identity.namespace._asdict()


# -- for people --------------------------------------------------------------------------------


def print_block(found: FoundKey, console: Console, *, everything: bool) -> None:
    """Print a block. ``everything``: with the whole chain. ``console`` must not read markup: names
    come from files."""
    for block in found.blocks:
        console.print(_summary(found, block))
        for copy in block.copies:
            console.print(_copy_lines(copy, found.surveyed_s))
            console.print(_ranks_table(copy, console.width))
        console.print(_chain_table(block, console.width, None if everything else CHAIN_SHOWN))
    print_list(plural(len(found.problems), "problem"), found.problems, console, None, "")


def _summary(found: FoundKey, block: FoundBlock) -> Table:
    lines, tokens = make_lines(), block.block_tokens
    lines.add_row("Key", Text(block.key, "bold cyan"))
    name = printable(block.fingerprint)[:ID_LETTERS]
    epoch = f", epoch {block.epoch}" if block.epoch else ""
    lines.add_row("Namespace", Text.assemble((name, "magenta"), f"  {printable(block.model)}{epoch}"))
    others = ", ".join(str(group) for group in found.groups if group != block.group)
    more = f"  (also in {others}: give the whole key)" if others else ""
    lines.add_row("Group", Text.assemble(str(block.group), (more, "dim")))
    if tokens is None:
        lines.add_row("Tokens", "?")
    elif block.start_tokens is None:
        lines.add_row("Tokens", f"{number(tokens)}, somewhere in a prompt: the head of its chain is not here")
    else:
        lines.add_row("Tokens", f"{number(block.start_tokens)} up to {number(block.start_tokens + tokens)} of a prompt")
    ending = "nothing: the end of its chain"
    lines.add_row("Next", plural(block.children, "block") if block.children else ending)
    return lines


def _copy_lines(copy: Mapping[str, Any], now_s: int) -> Table:
    lines, uses, last_use_s = make_lines(), copy["uses"], copy["last_use_s"]
    owner = ("in use", "green") if copy["owner"] == "alive" else ("of a stopped engine", "yellow")
    lines.add_row("", "")
    lines.add_row("Copy", Text.assemble(f"{engine_store(copy['engine_store'])}  ", owner))
    place = f"segment {copy['segment']}, slot {copy['slot']}, drive {printable(copy['drive'])}"
    lines.add_row("Place", f"{place}; generation {copy['generation']}")
    used = f"{plural(uses, 'time')}, last {ago(last_use_s, now_s)}" if uses else "never"
    used = "not known yet" if uses is None else used
    lines.add_row("Stored", f"{ago(copy['stored_s'], now_s)}; used {used}")
    return lines


def _ranks_table(copy: Mapping[str, Any], width: int) -> Table:
    words = (left("Checksum"), left("Header and payload"), folded("File"))
    table = make_table("Slots", width, "Rank", "Offset", "Payload", *words)
    for rank in copy["ranks"]:
        header, count = rank.header, len(rank.problems)
        table.add_row(
            str(rank.rank),
            number(rank.offset),
            number(header["payload_bytes"] if header else None),
            _CHECKSUM_KINDS.get(header["checksum_kind"], "?") if header else "?",
            Text(f"✗ {plural(count, 'problem')}", "red") if count else Text("✓ as recorded", "green"),
            "?" if rank.file is None else printable(PurePath(*rank.file.parts[-3:])),
        )
    return table


def _chain_table(block: FoundBlock, width: int, most: int | None) -> Table:
    chain, tokens, is_whole = block.chain, block.block_tokens, block.position is not None
    title = f"Chain, {plural(len(chain), 'block')} from its head" if is_whole else "Chain"
    table = make_table(title, width, "Position", "Tokens up to", folded("Block", "cyan"))
    if not is_whole:
        table.add_row("", "", Text("… a block that is not here", "dim"))
    hidden = range(0) if most is None else range(most, len(chain) - most)
    for position, name in enumerate(chain):
        if position not in hidden:
            end = number(None if tokens is None or not is_whole else (position + 1) * tokens)
            table.add_row(str(position) if is_whole else "?", end, name[:_NAME_LETTERS])
        elif position == hidden.start:
            table.add_row("…", "", Text(f"{number(len(hidden))} more (see --all)", "dim"))
    return table
