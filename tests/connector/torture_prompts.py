# SPDX-License-Identifier: Apache-2.0
"""Seeded prompts and requests for the torture tests, and the check of a store against its own records."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvdisk.cli.survey import survey_store
from kvdisk.device.header import payload_checksum, read_header
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.lmdb_index import LmdbIndex

BLOCK_TOKENS = 32
LONGEST = 360
MOST_TOKENS = 32


def _length(rng: random.Random) -> int:
    """Any length, or one beside a whole number of blocks."""
    blocks = rng.randrange(1, LONGEST // BLOCK_TOKENS + 1)
    length = rng.choice([rng.randrange(1, LONGEST), blocks * BLOCK_TOKENS + rng.choice([-1, 0, 1])])
    return max(1, min(LONGEST, length))


def make_prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts whose prefixes branch at random places."""
    rng = random.Random(seed)
    roots = [[rng.randrange(10, 500) for _ in range(LONGEST)] for _ in range(4)]
    prompts = []
    for _ in range(count):
        base = rng.choice(roots)[: _length(rng)]
        base = base + [rng.randrange(10, 500) for _ in range(LONGEST - len(base))]
        prompts.append(base[: _length(rng)])
        if rng.random() < 0.3:
            roots.append(base)
    return prompts


def make_requests(seed: int, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Requests of one round, see ``engine_acts.run_requests``; ``which`` is the prompt."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        which = rng.randrange(len(prompts))
        requests.append(
            {
                "which": which,
                "prompt": prompts[which],
                "max_tokens": rng.randrange(1, MOST_TOKENS + 1),
                "at": rng.randrange(3 * count),
                "abort": rng.randrange(30) if rng.random() < 0.2 else None,
                "salt": "salt" if rng.random() < 0.1 else None,
                "logprobs": rng.random() < 0.1,
                "n": 2 if rng.random() < 0.1 else 1,
            }
        )
    return requests


def verify_store(store: Path, cap_bytes: int) -> int:
    """Assert that the store is sound, below its cap, and that every record's slot holds its block; return the records.

    For a store of one rank that nobody has damaged; an engine that has it open must be idle.
    """
    survey = survey_store(store)
    assert not survey.problems, survey.problems
    count = 0
    for home in survey.homes:
        assert home.allocated_bytes <= cap_bytes, (home.allocated_bytes, cap_bytes)
        slot_bytes = {segment.segment: segment.slot_bytes for segment in home.segments}
        index = LmdbIndex(home.path / "index", readonly=True)
        records = list(index.blocks())
        index.close()
        assert len({record.slot for record in records}) == len(records), "two records of one slot"
        for record in records:
            size = slot_bytes[record.slot.segment]
            assert size is not None
            with (home.path / "segments" / str(record.slot.segment) / "rank0.kv").open("rb") as file:
                file.seek(slot_offset(size, record.slot.index))
                slot = memoryview(file.read(size))
            header = read_header(slot)
            assert (header.key, header.generation, header.namespace.epoch, header.parent) == (
                record.key,
                record.generation,
                record.epoch,
                record.parent,
            )
            payload = slot[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
            assert payload_checksum(payload, header.checksum_kind) == header.checksum
        count += len(records)
    return count
