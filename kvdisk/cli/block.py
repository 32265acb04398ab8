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
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk import __version__
from kvdisk.blocks import GROUP_BYTES, group_of
from kvdisk.cli.indexes import NONE, HomeColumns, ReadHome, ReadNamespace, Records, ranks_of, read_namespaces
from kvdisk.cli.output import ID_LETTERS, add_column, ago, make_lines, make_table, number, plural, print_list, printable
from kvdisk.cli.prefixes import Forest, grow_forest, locate
from kvdisk.cli.survey import JSON_VERSION
from kvdisk.device import paths
from kvdisk.device.control import HomeSummary
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.header import SlotHeader, payload_checksum, read_header
from kvdisk.device.listing import list_homes
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import BlockRecord, SegmentRecord

CHAIN_SHOWN = 6
MOST_NAMED = 5
"""Hashes that are named where a key's beginning is that of several."""
_ATTEMPTS = 3
_MOST_SLOT_BYTES = 1 << 30
_CHECKSUM_KINDS = {1: "xxh3_128", 2: "multilinear"}


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A rank's slot of a copy. ``offset``: of the slot in the file.

    ``problems``: sentences; none where header and payload agree with the record. ``header``: null
    where none can be read; else key, parent, generation, epoch, fingerprint, rank, rank_count,
    payload_bytes, checksum_kind, checksum.
    """

    rank: int
    file: Path | None
    offset: int | None
    problems: tuple[str, ...]
    header: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A block in one home, as its index and USES have it. ``uses``, ``last_use_s``: null where USES
    does not tell."""

    home: str
    owner: Literal["alive", "orphan"]
    segment: int
    slot: int
    drive: int | None
    generation: int
    parent: bytes | None
    stored_s: int
    uses: int | None
    last_use_s: int | None
    ranks: tuple[RankSlot, ...]


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block of one namespace and epoch.

    ``position``, ``start_tokens``: blocks and tokens before it in its chain; null where the chain's
    head is not here. ``children``: how many blocks follow it directly. ``chain``: hashes of the
    blocks up to this one, the head first.
    """

    fingerprint: bytes | None
    model: Any
    epoch: int
    key: bytes
    group: int
    block_tokens: int | None
    position: int | None
    start_tokens: int | None
    children: int
    chain: tuple[bytes, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class FoundKey:
    """What a store has whose key begins so: one hash, in one or more namespaces, epochs and homes.

    ``key``: as it was given. ``groups``: all KV-cache groups that have a block of this hash;
    ``blocks`` are those of the lowest, or of the one in ``key``.
    """

    json_version: int
    kvdisk_version: str
    surveyed_s: int
    ok: bool
    problems: tuple[str, ...]
    key: str
    groups: tuple[int, ...]
    blocks: tuple[FoundBlock, ...]


def survey_block(directories: Directories, wanted: str) -> FoundKey:
    """Return what a store has whose key begins with ``wanted`` (lower-case hex).

    Raises ConfigError where there is none, or several; and as ``survey.survey_store``.
    """
    for _ in range(_ATTEMPTS):
        found = _survey(directories, wanted)
        if found.ok or all(copy.owner == "orphan" for block in found.blocks for copy in block.copies):
            break  # else an owner may have given the slot to another block meanwhile: look again
    return found


def _survey(directories: Directories, wanted: str) -> FoundKey:
    read = read_namespaces(list_homes(list_directories(directories)))
    rows = [[_rows(home, wanted) for home in namespace.columns] for namespace in read]
    keys = {
        home.columns.keys[row]
        for namespace, of_homes in zip(read, rows, strict=True)
        for home, found in zip(namespace.columns, of_homes, strict=True)
        for row in found
    }
    hashes = sorted({key[:-GROUP_BYTES].hex() for key in keys})
    if len(hashes) > 1:
        named = ", ".join(f"{name[: len(wanted) + 8]}…" for name in hashes[:MOST_NAMED])
        raise ConfigError(f"{len(hashes)} blocks have a key that begins with {wanted} ({named}); give more digits")
    if not hashes:
        unread = sum(home.index.problem is not None for namespace in read for home in namespace.homes)
        without = f" ({unread} of its indexes cannot be read)" if unread else ""
        raise ConfigError(f"no block of this store has a key that begins with {wanted}{without}")
    groups = tuple(sorted({group_of(key) for key in keys}))
    blocks = tuple(
        block
        for namespace, of_homes in zip(read, rows, strict=True)
        if any(of_homes)
        for block in _blocks(namespace, of_homes, groups[0])
    )
    problems = tuple(
        f"home {copy.home}: rank {rank.rank}: {problem}"
        for block in blocks
        for copy in block.copies
        for rank in copy.ranks
        for problem in rank.problems
    )
    return FoundKey(JSON_VERSION, __version__, int(time.time()), not problems, problems, wanted, groups, blocks)


def _rows(home: HomeColumns, wanted: str) -> list[int]:
    """Return the rows whose keys begin so."""
    whole = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
    rows = [row for row, key in enumerate(home.columns.keys) if key.startswith(whole)]
    return [row for row in rows if home.columns.keys[row].hex().startswith(wanted)]


def _blocks(namespace: ReadNamespace, rows: Sequence[Sequence[int]], group: int) -> Iterator[FoundBlock]:
    """Yield a block for each epoch that has one in these rows, of this KV-cache group."""
    readable = [home for home in namespace.homes if home.blocks is not None]
    columns = namespace.columns
    forest = grow_forest(columns, namespace.block_tokens)
    by_epoch: dict[int, list[tuple[int, int]]] = {}
    for at, of_home in enumerate(rows):
        for row in of_home:
            if columns[at].groups[row] == group:
                by_epoch.setdefault(int(columns[at].columns.epochs[row]), []).append((at, row))
    for epoch, found in sorted(by_epoch.items()):
        at, row = found[0]
        node = int(forest.node_of[at][row])
        chain = tuple(_chain(columns, forest, node))
        position = len(chain) - 1 if forest.is_whole[node] else None
        tokens = namespace.block_tokens[group] if group < len(namespace.block_tokens) else None
        record = namespace.record
        yield FoundBlock(
            fingerprint=record.fingerprint if record else None,
            model=record.description.get("model") if record else None,
            epoch=epoch,
            key=columns[at].columns.keys[row],
            group=group,
            block_tokens=tokens,
            position=position,
            start_tokens=None if position is None or tokens is None else position * tokens,
            children=int(np.count_nonzero(forest.parents == node)),
            chain=chain,
            copies=tuple(_copy(readable[at], columns[at], row) for at, row in found),
        )


def _chain(columns: Sequence[HomeColumns], forest: Forest, node: int) -> list[bytes]:
    """Return the hashes of the chain up to a block, from its head on."""
    chain = []
    while node != NONE:
        at, row = locate(columns, int(forest.first_rows[node]))
        chain.append(columns[at].columns.keys[row][:-GROUP_BYTES])
        node = int(forest.parents[node])
    return chain[::-1]


# -- slots -------------------------------------------------------------------------------------


def _copy(read: ReadHome, blocks: HomeColumns, row: int) -> Copy:
    home = read.summary
    record = Records(blocks.columns)[row]
    segment = next((one for one in read.index.segments if one.segment == record.slot.segment), None)
    ranks = ranks_of(home.record, home.segments)
    is_told = bool(blocks.is_known[row])
    return Copy(
        home=home.id,
        owner="alive" if home.alive else "orphan",
        segment=record.slot.segment,
        slot=record.slot.index,
        drive=segment.drive if segment else None,
        generation=record.generation,
        parent=record.parent,
        stored_s=record.stored_s,
        uses=int(blocks.uses[row]) if is_told and blocks.uses is not None else None,
        last_use_s=int(blocks.last_use_s[row]) if is_told and blocks.last_use_s is not None else None,
        ranks=tuple(_rank_slot(home, segment, record, rank, ranks) for rank in range(ranks)),
    )


def _rank_slot(
    home: HomeSummary, segment: SegmentRecord | None, record: BlockRecord, rank: int, ranks: int
) -> RankSlot:
    if segment is None:
        return RankSlot(rank, None, None, (f"the index has no segment {record.slot.segment}",))
    offset = slot_offset(segment.slot_bytes, record.slot.index)
    folder = home.folders[segment.drive] if segment.drive < len(home.folders) else None
    if folder is None:
        return RankSlot(rank, None, offset, (f"drive {segment.drive} was not looked at, name its directory too",))
    path = folder.segments_path / str(segment.segment) / f"rank{rank}.kv"
    try:
        slot = _read(path, min(segment.slot_bytes, _MOST_SLOT_BYTES), offset)
        header = read_header(memoryview(slot))
    except OSError as error:
        return RankSlot(rank, path, offset, (f"{path.name} cannot be read ({error.strerror})",))
    except KvdiskError as error:
        return RankSlot(rank, path, offset, (str(error),))
    fingerprint = home.record.fingerprint if home.record else None
    problems = tuple(_disagreements(header, slot, record, rank, ranks, fingerprint))
    names = ("key", "parent", "generation", "rank", "rank_count", "payload_bytes", "checksum_kind", "checksum")
    said = {name: getattr(header, name) for name in names} | header.namespace._asdict()
    return RankSlot(rank, path, offset, problems, said)


def _read(path: Path, length: int, offset: int) -> bytes:
    """Return the bytes of a slot. Raises OSError, KvdiskError where the file ends before them."""
    fd = paths.open_regular(path, os.O_RDONLY)
    if fd < 0:
        raise KvdiskError(f"{path.name} is not a file")
    try:
        found = os.pread(fd, length, offset)
    finally:
        os.close(fd)
    if len(found) < length:
        raise KvdiskError(f"{path.name} ends before the slot does")
    return found


def _disagreements(
    header: SlotHeader, slot: bytes, record: BlockRecord, rank: int, ranks: int, fingerprint: bytes | None
) -> Iterator[str]:
    expected: list[tuple[str, Any, Any]] = [
        ("key", header.key, record.key),
        ("generation", header.generation, record.generation),
        ("epoch", header.namespace.epoch, record.epoch),
        ("parent", header.parent or None, record.parent),
        ("rank", header.rank, rank),
        ("rank count", header.rank_count, ranks),
    ]
    if fingerprint is not None:
        expected.append(("namespace", header.namespace.fingerprint, fingerprint))
    for name, *values in expected:
        if values[0] != values[1]:
            says, wanted = (value.hex() if isinstance(value, bytes) else value for value in values)
            yield f"the header's {name} is {says}, the index says {wanted}"
    payload = memoryview(slot)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if len(payload) < header.payload_bytes:
        yield f"the header speaks of {header.payload_bytes} bytes, the slot has {len(payload)}"
    elif payload_checksum(payload, header.checksum_kind) != header.checksum:
        yield "the payload does not have the checksum that its header says"


# -- for people --------------------------------------------------------------------------------


def print_block(found: FoundKey, console: Console, *, everything: bool) -> None:
    """Print a block. ``everything``: the whole chain. ``console`` must not read markup: names come
    from files."""
    for block in found.blocks:
        console.print(_summary(found, block))
        for copy in block.copies:
            console.print(_copy_lines(copy, found.surveyed_s))
            console.print(_ranks_table(copy, console.width))
        console.print(_chain_table(block, console.width, None if everything else CHAIN_SHOWN))
    print_list(plural(len(found.problems), "problem"), found.problems, console, None, "")


def _summary(found: FoundKey, block: FoundBlock) -> Table:
    lines, tokens = make_lines(), block.block_tokens
    lines.add_row("Block", Text(block.key.hex(), "bold cyan"))
    name = "?" if block.fingerprint is None else block.fingerprint.hex()[:ID_LETTERS]
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
    lines.add_row("Followed by", plural(block.children, "block") if block.children else ending)
    return lines


def _copy_lines(copy: Copy, now_s: int) -> Table:
    lines = make_lines()
    owner = ("in use", "green") if copy.owner == "alive" else ("orphan", "yellow")
    lines.add_row("", "")
    lines.add_row("Copy", Text.assemble("home ", (copy.home, "cyan"), "  ", owner))
    folder = next((rank.file.parents[2] for rank in copy.ranks if rank.file), None)
    if folder is not None:
        lines.add_row("Directory", printable(folder))
    drive = "?" if copy.drive is None else copy.drive
    lines.add_row("Place", f"segment {copy.segment}, slot {copy.slot}, drive {drive}")
    lines.add_row("Generation", str(copy.generation))
    lines.add_row("Stored", ago(copy.stored_s, now_s))
    if copy.uses is None:
        lines.add_row("Used", "? (USES does not tell of it yet)")
    elif copy.uses:
        lines.add_row("Used", f"{plural(copy.uses, 'time')}, last {ago(copy.last_use_s or 0, now_s)}")
    else:
        lines.add_row("Used", "never")
    return lines


def _ranks_table(copy: Copy, width: int) -> Table:
    table = make_table("Slots", width)
    for name in ("Rank", "Offset", "Payload"):
        add_column(table, name, "right")
    add_column(table, "Checksum")
    add_column(table, "Header and payload")
    table.add_column("File", overflow="fold")
    for rank in copy.ranks:
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
    table = make_table(f"Chain, {plural(len(chain), 'block')} from its head" if is_whole else "Chain", width)
    for title in ("Position", "Tokens up to"):
        add_column(table, title, "right")
    table.add_column("Block", overflow="fold", style="cyan")
    if not is_whole:
        table.add_row("", "", Text("… a block that is not here", "dim"))
    hidden = 0 if most is None else max(0, len(chain) - 2 * most)
    for position, name in enumerate(chain):
        if hidden and most is not None and position == most:
            table.add_row("…", "", Text(f"{number(hidden)} more (see --all)", "dim"))
        if not hidden or most is None or position < most or position >= most + hidden:
            end = "?" if tokens is None or not is_whole else number((position + 1) * tokens)
            table.add_row(str(position) if is_whole else "?", end, name.hex())
    return table
