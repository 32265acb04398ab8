# SPDX-License-Identifier: Apache-2.0
"""A store to show: two models, three homes, conversations and documents with shared beginnings, all
of it sound.

What an engine would have written is written by the rooms that an engine uses, but for the bytes of
the blocks, which are made up. ``python tools/demo_store.py DIR`` makes one (500 MB) and leaves it
with no owner.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.cli.why import chain_hashes
from kvdisk.device.header import SlotIdentity, seal_slot
from kvdisk.device.home import Home
from kvdisk.device.segment import DriveFolder, create_segment
from kvdisk.device.store import Store
from kvdisk.device.uses import USES_RECORD, write_uses
from kvdisk.engine_store import describe_geometry
from kvdisk.geometry import HEADER_BYTES, Geometry, GroupGeometry, Namespace, slot_offset
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.messages import SegmentSpec

HOUR_S, DAY_S = 3600, 86400
BLOCK_TOKENS = 16
FIRST_SLOT = Slot(0, 0)


class Model(NamedTuple):
    """A namespace. ``payload_bytes``: of a block on one rank."""

    name: str
    dtype: str
    kv_dtype: str
    ranks: int
    payload_bytes: int

    @property
    def geometry(self) -> Geometry:
        """Its sizes."""
        return Geometry((GroupGeometry(0, BLOCK_TOKENS, self.payload_bytes),), self.ranks, BLOCK_TOKENS)

    @property
    def fingerprint(self) -> bytes:
        """A made-up one."""
        return hashlib.sha256(self.name.encode()).digest()

    @property
    def description(self) -> dict[str, Any]:
        """What HOME says of it."""
        said = {"model": self.name, "dtype": self.dtype, "kv_dtype": self.kv_dtype, "tensor_parallel": self.ranks}
        return said | {"geometry": describe_geometry(self.geometry), "facts": {"hash": '["sha256", null]'}}


SMALL = Model("Qwen/Qwen2.5-0.5B-Instruct", "torch.bfloat16", "auto", 1, 24 * 2 * 2 * 64 * 2 * BLOCK_TOKENS)
LARGE = Model("meta-llama/Llama-3.2-1B-Instruct", "torch.bfloat16", "fp8", 2, 16 * 2 * 4 * 64 * 1 * BLOCK_TOKENS)

LLAMA_8B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The config.json of a larger one, for commands that count and need no store."""


@dataclass
class Block:
    """A block of a prompt, with what has happened to it. ``followers``: blocks that were computed
    behind it."""

    key: BlockKey
    parent: Block | None
    stored_s: int
    uses: int = 0
    last_use_s: int = 0
    followers: int = 0
    tokens: tuple[int, ...] = ()
    generation: int = 0
    slot: Slot = FIRST_SLOT

    @property
    def parent_key(self) -> BlockKey | None:
        """As its header and its record name it."""
        return None if self.parent is None else self.parent.key


@dataclass
class Prompts:
    """Chains of blocks that share beginnings, as one engine has met them. ``now_s``: when the last
    was."""

    chance: random.Random
    now_s: int
    blocks: list[Block] = field(default_factory=list)

    def extend(self, parent: Block | None, count: int, ago_s: float) -> Block:
        """Compute and store so many blocks behind ``parent``, so many seconds ago; return the
        last."""
        before, more = prompt_of(parent), [self.chance.randrange(1000, 100_000) for _ in range(count * BLOCK_TOKENS)]
        for at, name in enumerate(chain_hashes([*before, *more], BLOCK_TOKENS, "sha256", None)[-count:]):
            if parent is not None:
                parent.followers += 1
            tokens = tuple(more[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            parent = Block(make_block_key(name, 0), parent, int(self.now_s - ago_s), tokens=tokens)
            self.blocks.append(parent)
        assert parent is not None
        return parent

    def use(self, last: Block | None, ago_s: float, times: int = 1) -> None:
        """Load a chain up to ``last``, the last time so many seconds ago."""
        while last is not None:
            last.uses += times
            last.last_use_s = max(last.last_use_s, int(self.now_s - ago_s))
            last = last.parent

    def assistant(self, system_blocks: int, conversations: int, span_s: float) -> None:
        """Conversations behind one system prompt, of a few turns each; every turn comes back with
        the ones before."""
        system = self.extend(None, system_blocks, span_s)
        for _ in range(conversations):
            began_s = self.chance.uniform(0.02, 1.0) * span_s
            last, ago_s = system, began_s
            for _ in range(self.chance.choice((1, 1, 2, 2, 3, 5))):
                self.use(last, ago_s)
                last = self.extend(last, self.chance.randint(3, 14), ago_s)
                ago_s = max(20.0, ago_s - self.chance.uniform(60, 900))

    def document(self, blocks: int, questions: int, first_ago_s: float) -> None:
        """A document that several people ask about; the questions' own blocks are few."""
        end = self.extend(None, blocks, first_ago_s)
        for number in range(questions):
            ago_s = first_ago_s * (1 - number / max(1, questions)) * self.chance.uniform(0.5, 1.0)
            if number:
                self.use(end, ago_s)
            self.extend(end, self.chance.randint(1, 4), ago_s)


def prompt_of(last: Block | None) -> list[int]:
    """Return the tokens of a chain up to ``last``."""
    blocks = []
    while last is not None:
        blocks.append(last)
        last = last.parent
    return [token for block in reversed(blocks) for token in block.tokens]


def fill(home: Home, model: Model, prompts: Prompts, slot_count: int, *, dropped: float) -> LmdbIndex:
    """Write blocks and their records, in segments of so many slots. ``dropped``: this share of them
    has left again.

    Those that left are ends of chains, as eviction has it.
    """
    group = model.geometry.groups[0]
    blocks = sorted(prompts.blocks, key=lambda block: block.stored_s)
    for at, block in enumerate(blocks):
        block.slot, block.generation = Slot(at // slot_count, at % slot_count), prompts.now_s * 1_000_000_000 + at
    kept = _without_ends(blocks, int(len(blocks) * dropped), prompts.chance)
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(10_000))
    namespace = Namespace(model.fingerprint, 0)
    with mmap.mmap(-1, group.slot_bytes) as memory, memoryview(memory) as view:
        view[HEADER_BYTES : HEADER_BYTES + (1 << 12)] = prompts.chance.randbytes(1 << 12)
        for segment in range(-(-len(blocks) // slot_count)):
            spec = SegmentSpec(segment, group.slot_bytes, slot_count)
            for rank in range(model.ranks):
                create_segment(DriveFolder(home.path), spec, rank, model.ranks, model.fingerprint).close()
                fd = os.open(home.segments_path / str(segment) / f"rank{rank}.kv", os.O_WRONLY)
                for block in blocks[segment * slot_count : (segment + 1) * slot_count]:
                    sizes = (group.payload_bytes, rank, model.ranks)
                    seal_slot(view, SlotIdentity(namespace, block.key, block.generation, *sizes), block.parent_key)
                    os.pwrite(fd, view, slot_offset(group.slot_bytes, block.slot.index))
                os.close(fd)
            index.put_segment(SegmentRecord(segment, group.slot_bytes, slot_count))
    for start in range(0, len(kept), 500):
        some = kept[start : start + 500]
        index.put([BlockRecord(0, one.key, one.slot, one.generation, one.parent_key, one.stored_s) for one in some])
        assert index.flush(60)
    write_uses(home.path, np.array([(one.generation, one.uses, one.last_use_s) for one in kept], USES_RECORD))
    return index


def _without_ends(blocks: Sequence[Block], count: int, chance: random.Random) -> list[Block]:
    """Take blocks away that no other one follows, those of the oldest chains first."""
    left = list(blocks)
    for _ in range(count):
        followed = {id(block.parent) for block in left}
        ends = [block for block in left if id(block) not in followed]
        left.remove(chance.choice(ends[:8]))
    return left


class Plan(NamedTuple):
    """A home to make: its last use so many seconds ago, slots of a segment, share of blocks that
    have left again."""

    model: Model
    ago_s: int
    slot_count: int
    dropped: float
    is_owned: bool


PLANS = (
    Plan(LARGE, 2 * DAY_S, 240, 0.1, False),
    Plan(SMALL, 5 * HOUR_S, 320, 0.0, False),
    Plan(SMALL, 8, 320, 0.06, True),
)
DOCUMENT_QUESTIONS = 9
CAP_BYTES, INDEX_BYTES = 1 << 30, 16 << 20


def prompts_of(number: int, now_s: int) -> Prompts:
    """Return what the engine of a plan has met."""
    prompts = Prompts(random.Random(number), now_s)  # noqa: S311 - the same store again
    if number == 0:
        prompts.document(250, 7, 2.5 * DAY_S)
        prompts.document(180, 3, 1.2 * DAY_S)
        prompts.assistant(40, 10, 4 * DAY_S)
    elif number == 1:
        prompts.assistant(64, 20, 9 * HOUR_S)
    else:
        prompts.assistant(64, 44, 4.5 * HOUR_S)
        prompts.document(250, DOCUMENT_QUESTIONS, 3.6 * HOUR_S)
        prompts.document(131, 4, 1.4 * HOUR_S)
        prompts.document(96, 1, 0.5 * HOUR_S)
    return prompts


def branching_block() -> Block:
    """Return the last block of the first document: several questions follow it."""
    blocks = prompts_of(len(PLANS) - 1, 0).blocks
    return next(block for block in blocks if block.followers == DOCUMENT_QUESTIONS)


@contextmanager
def demo_store(path: Path, *, owned: bool = True, payload_bytes: int | None = None) -> Iterator[Path]:
    """Make the store. While this runs, one of its homes has an owner, this process, unless told
    otherwise.

    ``payload_bytes``: of a block on one rank, where the store shall be smaller than that of real
    models.
    """
    now_s = int(time.time())
    clock = [float(now_s)]
    orphaned, end = ExitStack(), ExitStack()
    with orphaned, end:
        for number, plan in enumerate(PLANS):
            prompts = prompts_of(number, now_s - plan.ago_s)
            clock[0] = min(block.stored_s for block in prompts.blocks) - 60
            is_owned = plan.is_owned and owned
            model = plan.model if payload_bytes is None else plan.model._replace(payload_bytes=payload_bytes)
            store = Store.open(path, clock=lambda: clock[0])
            home = store.acquire_home(model.fingerprint, model.description, CAP_BYTES, index_bytes=INDEX_BYTES)
            home.adopt_index()
            index = fill(home, model, prompts, plan.slot_count, dropped=plan.dropped)
            clock[0] = now_s - plan.ago_s
            home.mark_used()
            # All have owners until the last one is made: an engine would take over an orphan of its
            # model.
            (end if is_owned else orphaned).callback(_close, home, index, clock, now_s - plan.ago_s, clean=not is_owned)
        orphaned.close()
        yield path


def _close(home: Home, index: LmdbIndex, clock: list[float], then_s: int, *, clean: bool) -> None:
    index.close()
    clock[0] = then_s
    home.close(clean=clean)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    with demo_store(Path(sys.argv[1]).absolute(), owned=False):
        return 0


if __name__ == "__main__":
    sys.exit(main())
