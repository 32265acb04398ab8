# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR KEY``: one block with its record, the slot of every rank, its chain and its uses.

With ``--json`` one object; ``null`` is what cannot be known::

    json_version, kvdisk_version, surveyed_s, ok, problems      as of ``kvdisk inspect --json``
    key                hex, as it was given
    groups[]           all KV-cache groups that have a block of this hash; shown is the lowest, or the one in ``key``
    blocks[]           one for each namespace and epoch
      fingerprint, model, epoch, key (hex), group, block_tokens
      position         blocks before it in its chain; null where the chain's head is not here
      start_tokens     tokens before it; null likewise
      children         how many blocks follow it directly
      chain[]          hashes of the blocks up to this one (hex), the head first
      copies[]         one for each home that has it
        home, owner ("alive" or "orphan"), segment, slot, drive, generation, parent (hex), stored_s, uses, last_use_s
        ranks[]        rank, file, offset (of the slot in the file), problems[] (sentences; empty: header and payload
                       agree with the record), header: null where none can be read, else
                       key, parent, generation, epoch, fingerprint, rank, rank_count, payload_bytes, checksum_kind,
                       checksum (hex)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdisk.cli.index_reader import ask_child
from kvdisk.cli.inspect_json import json_head
from kvdisk.cli.store_facts import ranks_of
from kvdisk.cli.survey import index_namespaces
from kvdisk.device import paths
from kvdisk.device.control import HomeSummary
from kvdisk.device.drives import Directories, list_directories
from kvdisk.device.header import SlotHeader, payload_checksum, read_header
from kvdisk.device.listing import list_homes
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import SegmentRecord

_ATTEMPTS = 3
_MOST_SLOT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's slot of a copy. ``header``: None where none can be read; ``problems``: sentences."""

    rank: int
    file: str | None
    offset: int | None
    header: SlotHeader | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """A block in one home; ``record``: what the index and USES say, by the names of the JSON."""

    home: HomeSummary
    drive: int | None
    record: dict[str, Any]
    ranks: tuple[RankFacts, ...]


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block of one namespace and epoch. ``found``: what the child says of it."""

    fingerprint: bytes | None
    model: Any
    found: dict[str, Any]
    copies: tuple[CopyFacts, ...]

    @property
    def position(self) -> int | None:
        """Blocks before it in its chain; None where the chain's head is not here."""
        return len(self.found["chain"]) - 1 if self.found["is_whole"] else None

    @property
    def start_tokens(self) -> int | None:
        """Tokens before it; None likewise."""
        tokens = self.found["block_tokens"]
        return None if self.position is None or tokens is None else self.position * tokens


@dataclass(frozen=True)
class BlockFacts:
    """What a store has of one block. ``groups``: all KV-cache groups that have its hash."""

    wanted: str
    surveyed_s: int
    groups: tuple[int, ...]
    blocks: tuple[FoundBlock, ...]
    problems: tuple[str, ...] = field(default=())


def survey_block(directories: Directories, wanted: str) -> BlockFacts:
    """Return what the store in these directories has whose key begins with ``wanted`` (lower-case hex).

    Raises ConfigError where there is none, or several; and as ``survey.survey_store``.
    """
    facts = BlockFacts(wanted, 0, (), ())
    for _ in range(_ATTEMPTS):
        facts, alive = _survey(directories, wanted)
        if not (alive and facts.problems):
            break  # an owner may have given the slot to another block meanwhile: look again
    return facts


def _survey(directories: Directories, wanted: str) -> tuple[BlockFacts, bool]:
    summaries = list_homes(list_directories(directories))
    groups, namespaces = index_namespaces(summaries)
    answers = ask_child(namespaces, {"what": "find", "wanted": wanted})
    found = [answer for answer in answers.namespaces if isinstance(answer, dict)]
    unread = sum(isinstance(answer, str) for of_homes in answers.homes for answer in of_homes)
    hashes = {name for answer in found for name in answer["named"]}
    count = max([len(hashes), *(answer["hashes"] for answer in found)])
    if count > 1:
        named = ", ".join(f"{name[: len(wanted) + 8]}…" for name in sorted(hashes)[:5])
        raise ConfigError(f"{count} blocks have a key that begins with {wanted} ({named}); give more digits")
    if not count:
        without = f" ({unread} of its indexes cannot be read)" if unread else ""
        raise ConfigError(f"no block of this store has a key that begins with {wanted}{without}")
    of_groups = sorted({block["group"] for answer in found for block in answer["blocks"]})
    blocks = []
    for group, answer, of_homes in zip(groups, answers.namespaces, answers.homes, strict=True):
        for block in answer["blocks"] if isinstance(answer, dict) else ():
            if block["group"] == of_groups[0]:
                copies = tuple(
                    _copy(group[copy["home"]], of_homes[copy["home"]][0], block, copy) for copy in block["copies"]
                )
                record = group[0].record
                model = record.description.get("model") if record else None
                blocks.append(FoundBlock(record.fingerprint if record else None, model, block, copies))
    problems = tuple(_problems(blocks))
    alive = any(copy.home.alive for block in blocks for copy in block.copies)
    return BlockFacts(wanted, int(time.time()), tuple(of_groups), tuple(blocks), problems), alive


def _problems(blocks: Sequence[FoundBlock]) -> Iterator[str]:
    for block in blocks:
        for copy in block.copies:
            for rank in copy.ranks:
                for problem in rank.problems:
                    yield f"home {copy.home.id}: rank {rank.rank}: {problem}"


def _copy(home: HomeSummary, segments: Sequence[Any], block: dict[str, Any], copy: dict[str, Any]) -> CopyFacts:
    records = {record.segment: record for record in (SegmentRecord(*fields) for fields in segments)}
    segment = records.get(copy["segment"])
    ranks = ranks_of(home.record, home.segments)
    facts = tuple(_rank(home, segment, block, copy, rank, ranks) for rank in range(ranks))
    return CopyFacts(home, segment.drive if segment else None, copy, facts)


def _rank(
    home: HomeSummary, segment: SegmentRecord | None, block: dict[str, Any], copy: dict[str, Any], rank: int, ranks: int
) -> RankFacts:
    if segment is None:
        return RankFacts(rank, None, None, None, (f"the index has no segment {copy['segment']}",))
    offset = slot_offset(segment.slot_bytes, copy["slot"])
    folder = home.folders[segment.drive] if segment.drive < len(home.folders) else None
    if folder is None:
        return RankFacts(
            rank, None, offset, None, (f"drive {segment.drive} was not looked at, name its directory too",)
        )
    path = folder.segments_path / str(segment.segment) / f"rank{rank}.kv"
    try:
        slot = _read(path, min(segment.slot_bytes, _MOST_SLOT_BYTES), offset)
        header = read_header(memoryview(slot))
    except OSError as error:
        return RankFacts(rank, str(path), offset, None, (f"{path.name} cannot be read ({error.strerror})",))
    except KvdiskError as error:
        return RankFacts(rank, str(path), offset, None, (str(error),))
    return RankFacts(
        rank, str(path), offset, header, tuple(_disagreements(home, block, copy, rank, ranks, header, slot))
    )


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
    home: HomeSummary,
    block: dict[str, Any],
    copy: dict[str, Any],
    rank: int,
    ranks: int,
    header: SlotHeader,
    slot: bytes,
) -> Iterator[str]:
    parent = header.parent.hex() if header.parent else None
    expected: list[tuple[str, Any, Any]] = [
        ("key", header.key.hex(), block["key"]),
        ("generation", header.generation, copy["generation"]),
        ("epoch", header.namespace.epoch, block["epoch"]),
        ("parent", parent, copy["parent"]),
        ("rank", header.rank, rank),
        ("rank count", header.rank_count, ranks),
    ]
    if home.record is not None:
        expected.append(("namespace", header.namespace.fingerprint.hex(), home.record.fingerprint.hex()))
    wrong = [(name, says, wanted) for name, says, wanted in expected if says != wanted]
    for name, says, wanted in wrong:
        yield f"the header's {name} is {says}, the index says {wanted}"
    payload = memoryview(slot)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if len(payload) < header.payload_bytes:
        yield f"the header speaks of {header.payload_bytes} bytes, the slot has {len(payload)}"
    elif payload_checksum(payload, header.checksum_kind) != header.checksum:
        yield "the payload does not have the checksum that its header says"


def block_as_json(facts: BlockFacts) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    return {
        **json_head(facts.surveyed_s, facts.problems),
        "key": facts.wanted,
        "groups": list(facts.groups),
        "blocks": [_block_as_json(block) for block in facts.blocks],
    }


def _block_as_json(block: FoundBlock) -> dict[str, Any]:
    found = block.found
    return {
        "fingerprint": block.fingerprint.hex() if block.fingerprint else None,
        "model": block.model,
        **{name: found[name] for name in ("epoch", "key", "group", "block_tokens")},
        "position": block.position,
        "start_tokens": block.start_tokens,
        "children": found["children"],
        "chain": found["chain"],
        "copies": [
            copy.record
            | {"home": copy.home.id, "owner": "alive" if copy.home.alive else "orphan", "drive": copy.drive}
            | {"ranks": [_rank_as_json(rank) for rank in copy.ranks]}
            for copy in block.copies
        ],
    }


def _rank_as_json(rank: RankFacts) -> dict[str, Any]:
    header = rank.header
    return {
        "rank": rank.rank,
        "file": rank.file,
        "offset": rank.offset,
        "problems": list(rank.problems),
        "header": None
        if header is None
        else {
            "key": header.key.hex(),
            "parent": header.parent.hex() if header.parent else None,
            "generation": header.generation,
            "epoch": header.namespace.epoch,
            "fingerprint": header.namespace.fingerprint.hex(),
            "rank": header.rank,
            "rank_count": header.rank_count,
            "payload_bytes": header.payload_bytes,
            "checksum_kind": header.checksum_kind,
            "checksum": header.checksum.hex(),
        },
    }
