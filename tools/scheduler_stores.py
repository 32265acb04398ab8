# SPDX-License-Identifier: Apache-2.0
"""A part of ``measure_scheduler``: prompts that are stored, by both scheduler sides and by both managers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scheduler_hits import OURS, THEIRS, WITH_NVME, Sample, Turns, timed
from scheduler_stands import BLOCK_TOKENS, SLOT_BYTES, BothSides, completed, report_of

from kvdisk.blocks import BlockKey, Slot, Tier, make_block_keys
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmitAll
from kvdisk.manager.parts import Parts
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import JobKind, Plan

LONG = 512
MORE = 8
"""Prompts that follow one of less than LONG blocks at once, each in a step of its own. Even, as who begins changes."""
ALONE = ": manager alone"


class OursAlone:
    """What of kvdisk does what vLLM's ``CPUOffloadingManager`` does: catalog, slots and eviction of a CPU tier.

    Which blocks are there, places for the others, who leaves for them, and that they can be read once they are stored.
    """

    def __init__(self, slots: int) -> None:
        geometry = Geometry((GroupGeometry(0, BLOCK_TOKENS, SLOT_BYTES),), 1, BLOCK_TOKENS)
        parts = Parts.make(Config(), geometry, None)  # nobody asks the engine
        self._catalog = parts.catalog
        self._cpu = CpuSpace(parts, (slots,), AdmitAll())
        self._generation = 0

    def prepare(self, keys: Sequence[BlockKey]) -> tuple[list[int], list[Slot]]:
        """Begin to store the blocks of a prompt, none of which is there; return their rows and slots."""
        catalog = self._catalog
        slots, parents, rows = self._cpu.allocate(0, len(keys)), [None, *keys[:-1]], []
        for key, parent in zip(keys, parents, strict=True):  # a prompt of which something is there is not measured
            self._generation += 1
            rows.append(catalog.add(key, self._generation, 0, parent))
        catalog.begin(rows, Tier.CPU, slots)
        return rows, slots

    def complete(self, rows: list[int]) -> None:
        """The blocks are stored."""
        rows.reverse()
        self._cpu.finish(rows, 0)


class TheirsAlone:
    """vLLM's ``CPUOffloadingManager``."""

    def __init__(self, slots: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(slots)
        self.make_context, self.make_key = ReqContext, make_offload_key


class Stores:
    """Prompts that are stored whole; ``is_full``: each block takes the place of another.

    ``store_dir``: see ``BothSides``.
    """

    def __init__(self, blocks: int, *, is_full: bool, store_dir: Path | None = None) -> None:
        self._blocks = blocks
        self._tier_blocks = 4096 if is_full else 10**6
        self._where = ("each for another" if is_full else "into free room") + (WITH_NVME if store_dir else "")
        self._sides, self._turns = BothSides(0, 1, self._tier_blocks, store_dir), Turns()
        self._theirs = TheirsAlone(self._tier_blocks)
        # With NVMe it would be the same.
        self._ours = OursAlone(self._tier_blocks) if store_dir is None else None
        while is_full and self._sides.stored_blocks < 2 * self._tier_blocks:
            list(self._prompt(512))

    def round(self) -> Iterator[Sample]:
        """Store a prompt with both scheduler sides and with both managers alone, short ones several times."""
        yield from self._prompt(self._blocks)
        if self._blocks < LONG:
            for _ in range(MORE):
                yield from self._prompt(self._blocks, ", right after another")

    def _prompt(self, blocks: int, when: str = "") -> Iterator[Sample]:
        self._turns.next_round()
        sides = self._sides
        output = sides.prefill(blocks)
        (ours_s, theirs_s), plan = timed_sides(sides, output, self._turns)
        assert stored_by(plan) == blocks
        (request_id,) = output.num_scheduled_tokens
        hashes = [bytes(bytearray(block_hash)) for block_hash in sides.requests[request_id].block_hashes]
        sides.finish(request_id)
        what = f"store of {blocks} block{'s'[: blocks > 1]} of a request, {self._where}{when}, a block"
        yield what, OURS, ours_s / blocks
        yield what, THEIRS, theirs_s / blocks
        for owner, seconds in self._alone(request_id, hashes):
            yield what + ALONE, owner, seconds / blocks

    def _alone(self, request_id: str, hashes: list[bytes]) -> Iterator[tuple[str, float]]:
        """Let the managers alone store a prompt. Hashes are new objects: nobody has touched them."""
        theirs, ours = self._theirs, self._ours
        context = theirs.make_context(req_id=request_id)
        theirs.manager.on_new_request(context)
        their_keys = [theirs.make_key(block_hash, 0) for block_hash in hashes]

        def prepare() -> Any:
            return theirs.manager.prepare_store(their_keys, context)

        def complete() -> None:
            theirs.manager.complete_store(their_keys, context)

        if ours is None:
            first_s, prepared = timed(prepare)
            yield THEIRS, first_s + timed(complete)[0]
        else:
            keys = make_block_keys(hashes, 0)
            (first_s, (rows, slots)), (their_first_s, prepared) = self._turns.both(lambda: ours.prepare(keys), prepare)
            (last_s, _), (their_last_s, _) = self._turns.both(lambda: ours.complete(rows), complete)
            assert len(slots) == len(hashes)
            yield OURS, first_s + last_s
            yield THEIRS, their_first_s + their_last_s
        assert len(prepared.keys_to_store) == len(hashes)
        theirs.manager.on_request_finished(context)


def timed_sides(sides: BothSides, output: Any, turns: Turns) -> tuple[tuple[float, float], Plan]:
    """Let both scheduler sides plan a step and book it as done; return the time of each, and kvdisk's plan."""
    (ours_s, plan), (theirs_s, meta) = turns.both(
        lambda: sides.ours.plan(output), lambda: sides.theirs.build_connector_meta(output)
    )
    report, done = report_of(plan), completed(meta)
    (more_s, _), (their_s, _) = turns.both(
        lambda: sides.ours.settle(report, set()), lambda: sides.theirs.update_connector_output(done)
    )
    return (ours_s + more_s, theirs_s + their_s), plan


def stored_by(plan: Plan) -> int:
    """Return how many blocks a plan stores; it may demote others."""
    return sum(len(job.moves) for job in plan.jobs if job.kind is JobKind.STORE)
