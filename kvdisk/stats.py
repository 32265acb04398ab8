# SPDX-License-Identifier: Apache-2.0
"""Counters that add up over steps and ranks. Plain dictionaries, so that they travel as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COUNTERS: Mapping[str, str] = {
    "lookup_tokens": "tokens of requests that asked for an external hit",
    "hit_tokens_cpu": "tokens loaded from the CPU tier",
    "hit_tokens_nvme": "tokens loaded from the NVMe tier",
    "stored_blocks": "blocks copied from the GPU to the CPU tier (or through staging to NVMe)",
    "demoted_blocks": "blocks written from the CPU tier to NVMe",
    "promoted_blocks": "blocks read from NVMe into CPU slots",
    "prefetched_blocks": "of these, blocks read ahead for requests that waited in the queue",
    "failed_promotions": "blocks that could not be read ahead",
    "loaded_blocks": "blocks loaded to the GPU",
    "evicted_blocks_cpu": "copies that left the CPU tier for room",
    "evicted_blocks_nvme": "copies that left the NVMe tier for room",
    "refused_blocks": "offers refused for lack of room or reuse",
    "refused_reuse": "of these, offers of blocks that too few requests had wanted",
    "refused_room": "of these, offers for which no slot, or no GPU block to hold, was left",
    "refused_budget": "of these, offers that came when the day's bytes to write were spent",
    "left_without_reuse": "copies that left the CPU tier and that too few requests had wanted for NVMe",
    "left_without_room": "copies that left the CPU tier because NVMe could not take them in time",
    "left_without_budget": "copies that left the CPU tier when the day's bytes to write were spent",
    "budget_pauses": "times that writes to NVMe stopped because the day's bytes were spent",
    "failed_loads": "block loads that failed and were recomputed",
    "failed_stores": "block stores or demotions that failed",
    "checksum_failures": "loads refused because the payload did not match its checksum",
    "header_failures": "loads refused because the slot held another record",
    "io_errors": "transfers that the device failed",
    "deadline_misses": "transfers given up at their deadline",
    "late_moves": "of these, transfers that the drive had begun and not ended",
    "lookup_waits": "lookups answered 'not yet' because a block was on its way",
    "short_hits": "lookups whose hit was too short to be worth a load",
    "wait_timeouts": "waits for a block on its way that ran out",
    "foreign_questions": "requests for which the other homes of the store were asked",
    "loaded_blocks_foreign": "of the loaded blocks, those read from another home",
    "foreign_failures": "loads from another home whose slot did not hold what its index said",
    "write_pauses": "times that writes to a drive stopped for a while after a failure",
    "segment_failures": "segments that could not be made for want of room, or for another failure",
    "dropped_records": "blocks on NVMe whose record could not be committed: a restart does not find them",
    "lost_events": "stored and removed blocks that were not published because too many waited",
    "drive_quarantines": "times that a drive was left alone because it failed to read or did not answer",
    "rank_bytes_gpu_to_cpu": "bytes copied from the GPU, summed over ranks",
    "rank_bytes_cpu_to_gpu": "bytes copied to the GPU, summed over ranks",
    "rank_bytes_written": "bytes written to NVMe, summed over ranks",
    "rank_bytes_read": "bytes read from NVMe, summed over ranks",
}
"""Every counter by name, with its meaning. Counters of moves count on one side only, so ranks do not double them,
but for those that say *summed over ranks* and the failure counters of the workers."""


@dataclass(slots=True)
class Stats:
    """A set of counters; a name that is not in ``COUNTERS`` is a programmer's error."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int = 1) -> None:
        """Increase one counter."""
        assert name in COUNTERS, name
        if amount:
            self.counts[name] = self.counts.get(name, 0) + amount

    def merge(self, other: Stats) -> None:
        """Add all counters of ``other``."""
        for name, amount in other.counts.items():
            self.add(name, amount)

    def take(self) -> Stats:
        """Return the counters so far and start again from zero."""
        taken = Stats(self.counts)
        self.counts = {}
        return taken

    def __getitem__(self, name: str) -> int:
        assert name in COUNTERS, name
        return self.counts.get(name, 0)

    @property
    def empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.counts
