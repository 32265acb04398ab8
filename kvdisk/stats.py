# SPDX-License-Identifier: Apache-2.0
"""What kvdisk counts and measures: the one table of metrics, and the values, which add up over
steps and ranks.

A *series* is a metric, or one value of its label: ``stored_blocks``, ``hit_tokens.cpu``. The series
of a drive, ``drive_read_bytes.0``, is known only once it has a value. Values are plain dictionaries
by series, so that they are sent as they are. docs/METRICS.md is this table in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from kvdisk.blocks import HIT_TIERS, KEPT_TIERS, Tier

MOST_SAMPLES = 1024
"""Samples of one series that are kept one by one between two reports. Beyond these, only number and
sum are kept."""


class Kind(Enum):
    """A COUNTER only rises. A GAUGE is a present value. A HISTOGRAM has samples, whose number and
    sum only rise."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One row of the table. ``label`` has one of ``values``; without ``values`` it has any, the
    number of a drive.

    ``about``: what is counted, in a phrase that names the unit. ``buckets``: the upper bounds of a
    histogram.
    """

    name: str
    kind: Kind
    about: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TIER_WORDS: Mapping[str, str] = {tier.label: tier.word for tier in Tier}
TIERS = tuple(tier.label for tier in KEPT_TIERS)
SOURCES = tuple(tier.label for tier in HIT_TIERS)
REFUSALS = ("reuse", "room", "budget", "share")
"""Why a tier refuses what it is offered."""


class Miss(StrEnum):
    """Why a request found less than all its whole blocks: what became of the first block that was
    missing, as far as the data that is kept anyway shows it (decision 36). ``words``: the reason
    for people."""

    words: str

    NEVER_SEEN = "never_seen", "never seen or forgotten"
    EVICTED_CPU = "evicted_cpu", "evicted from CPU"
    EVICTED_NVME = "evicted_nvme", "evicted from NVMe"
    EVICTED = "evicted", "evicted from CPU or NVMe"
    EXPIRED = "expired", "older than max_age_s"
    REFUSED = "refused", "refused by admission"
    NOT_STORED = "not_stored", "seen, but not stored"
    WRITING = "writing", "still being written"
    SHORT = "short", "too short to load"
    LOAD_FAILED = "load_failed", "load failed"
    EXCLUDED = "excluded", "in a tier that its kv_load_tiers excludes"

    def __new__(cls, label: str, words: str) -> Miss:
        """Return a member made of its two values."""
        miss = str.__new__(cls, label)
        miss._value_, miss.words = label, words
        return miss


JOBS = ("store", "load", "demote", "promote")
ROUTES = tuple(
    f"{start.label}_to_{end.label}"
    for near, far in (
        *sorted(combinations((Tier.GPU, *KEPT_TIERS), 2), key=lambda pair: pair[1] - pair[0]),
        (Tier.CPU, Tier.REMOTE),
    )
    for start, end in ((near, far), (far, near))
)
_TRANSFER_S = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_WAIT_S = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_PART_BYTES = tuple(float(1 << shift) for shift in (12, 14, 16, 18, 20, 21, 22, 23, 24))
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        # Hits and misses. The CPU tier is asked for every token that the GPU has not got, the NVMe
        # tier (other engines' stores included) for those that the CPU tier has not got: hit / (hit
        # + missed) is a tier's rate.
        Metric("lookup_tokens", _C, "tokens beyond the GPU's own cache that requests asked the tiers for"),
        Metric("hit_tokens", _C, "tokens that requests were given from a tier", "tier", SOURCES),
        Metric("missed_tokens", _C, "tokens that a tier was asked for, and that it did not give", "tier", SOURCES),
        Metric("hit_blocks", _C, "blocks that requests were given from a tier", "tier", SOURCES),
        Metric("missed_blocks", _C, "blocks that a tier was asked for, and that it did not give", "tier", SOURCES),
        Metric(
            "hit_ratio",
            _H,
            "share of the tokens that a request asked the tiers for, and was given, 0 to 1",
            buckets=_RATIOS,
        ),
        Metric(
            "misses",
            _C,
            "requests that hit fewer than all of their whole blocks, by what became of the first missing block",
            "reason",
            tuple(Miss),
        ),
        Metric(
            "saved_seconds",
            _C,
            "seconds, estimated, that hits would have taken to compute, less their loads; nothing until "
            "the engine's speed is measured",
        ),
        Metric("short_hits", _C, "lookups whose hit was too short to be worth a load"),
        Metric("lookup_waits", _C, "lookups answered 'not yet' because a block was on its way"),
        Metric("wait_timeouts", _C, "waits for a block on its way that timed out"),
        Metric("wait_seconds", _H, "seconds that a request waited for blocks on their way", buckets=_WAIT_S),
        # Blocks that moved.
        Metric("stored_blocks", _C, "blocks copied from the GPU to the CPU tier (or through staging to NVMe)"),
        Metric("demoted_blocks", _C, "blocks written from the CPU tier to NVMe"),
        Metric("sent_blocks", _C, "blocks that were sent to the remote store, or were there already"),
        Metric("loaded_blocks", _C, "blocks loaded to the GPU"),
        Metric("loaded_blocks_foreign", _C, "blocks loaded to the GPU that were read from another engine's store"),
        Metric("promoted_blocks", _C, "blocks read into CPU slots, or brought from the remote store to NVMe"),
        Metric(
            "prefetched_blocks", _C, "blocks read from NVMe into CPU slots ahead, for requests that waited in the queue"
        ),
        Metric("failed_stores", _C, "block stores or demotions that failed"),
        Metric("overwritten_blocks", _C, "blocks not stored, as the engine reused them before the copy could begin"),
        Metric("fence_seconds", _H, "seconds that a step waited for copies of blocks it writes", buckets=_WAIT_S),
        Metric(
            "failed_loads",
            _C,
            "blocks that failed to load and were recomputed, but for those of other engines that were gone",
        ),
        Metric(
            "failed_promotions",
            _C,
            "blocks that could not be read ahead, but for those of other engines that were gone",
        ),
        Metric("transfer_bytes", _H, "bytes of a part of a job, on one rank, by route", "route", ROUTES, _PART_BYTES),
        Metric(
            "transfer_seconds",
            _H,
            "seconds that a part of a job took on one rank, by route",
            "route",
            ROUTES,
            _TRANSFER_S,
        ),
        Metric("job_seconds", _H, "seconds from a job's plan until every rank has done it", "job", JOBS, _WAIT_S),
        Metric("drive_read_bytes", _C, "bytes read from a drive, on all ranks", "drive"),
        Metric("drive_written_bytes", _C, "bytes written to a drive, on all ranks", "drive"),
        Metric(
            "remote_read_bytes",
            _C,
            "bytes read well from the remote store, as it keeps them: with remote_codec fewer than in transfer_bytes",
        ),
        Metric(
            "remote_written_bytes",
            _C,
            "bytes written to the remote store, as it keeps them; what a bucket had already is not written",
        ),
        # Copies that left, and blocks that were not taken.
        Metric("evicted_blocks", _C, "copies evicted from a tier for room", "tier", TIERS),
        Metric(
            "share_evicted_blocks",
            _C,
            "copies evicted from a tier for others of one tenant, which had its salt_share there",
            "tier",
            TIERS,
        ),
        Metric(
            "expired_blocks", _C, "copies dropped from a tier because they were older than max_age_s", "tier", TIERS
        ),
        Metric("refused_blocks", _C, "offers to the first tier that were refused, by reason", "reason", REFUSALS),
        Metric(
            "evicted_unwritten",
            _C,
            "copies evicted from the CPU tier that NVMe had not taken, by reason",
            "reason",
            REFUSALS,
        ),
        Metric("budget_pauses", _C, "times that writes to NVMe stopped because the day's bytes were spent"),
        Metric("dropped_records", _C, "blocks on NVMe whose record could not be committed: a restart misses them"),
        Metric("lost_events", _C, "stored and removed blocks that were not published because too many waited"),
        # Failures.
        Metric(
            "verification_failures",
            _C,
            "blocks of this engine refused because their slot held another record (header), or because their "
            "bytes were wrong (checksum)",
            "kind",
            ("header", "checksum"),
        ),
        Metric("io_errors", _C, "transfers that the device failed", "op", ("read", "write")),
        Metric("deadline_misses", _C, "moves given up at their deadline"),
        Metric("late_moves", _C, "moves given up at their deadline while the drive was still working on them"),
        Metric("write_pauses", _C, "times that writes to a drive stopped for a while after a failure"),
        Metric("segment_failures", _C, "segments that could not be made, for want of room or another failure"),
        Metric("moved_segments", _C, "segments given up to make room for blocks of another size"),
        Metric("drive_quarantines", _C, "times that a drive was left alone because it failed to read or to answer"),
        Metric("foreign_questions", _C, "requests for which other engines' stores were asked"),
        Metric("remote_questions", _C, "requests for which the remote store was asked"),
        Metric("remote_rejects", _C, "blocks of the remote store that were not what was sent there"),
        Metric(
            "foreign_failures",
            _C,
            "blocks of another engine's store that were evicted, or their file dropped, before they were read",
        ),
        Metric(
            "switched_off", _C, "times that kvdisk switched itself off after an error, until the engine starts again"
        ),
        # Present values.
        Metric("used_bytes", _G, "bytes of a tier's slots that hold blocks, on all ranks", "tier", TIERS),
        Metric("capacity_bytes", _G, "bytes of all the slots that a tier may have, on all ranks", "tier", TIERS),
        Metric("held_blocks", _G, "blocks that a tier holds", "tier", TIERS),
        Metric(
            "unavailable_blocks",
            _G,
            "blocks on NVMe that are not served, as some rank cannot open their segment now; their room stays taken",
        ),
        Metric(
            "awaiting_commit_blocks", _G, "NVMe slots that come free when the deletion of their record is committed"
        ),
        Metric("queued_jobs", _G, "jobs planned or under way", "job", (*JOBS, "files")),
        Metric("backlog_blocks", _G, "blocks in the CPU tier that wait to be written to NVMe"),
        Metric("uncommitted_changes", _G, "changes of the index that wait for their commit"),
        Metric("fragmentation_ratio", _G, "share of the free NVMe slots that lie in runs of less than 8, 0 to 1"),
        Metric("write_budget_bytes", _G, "bytes that may be written to NVMe now; only where there is a budget"),
        Metric(
            "remote_paused",
            _G,
            "1 while the remote store is not asked, or not read on some rank, as it did not answer, else 0; only "
            "where there is one",
        ),
        Metric("drive_quarantined", _G, "1 while a drive is left alone, else 0", "drive"),
    )
}
"""Every metric by name. A block counts once however many ranks have a shard of it, and so does a
job. The bytes and parts of transfers, and the failures that workers find, count on each rank."""


FAILURES = {
    "failed_loads": "failed loads",
    "failed_stores": "failed stores",
    "failed_promotions": "failed promotions",
    "verification_failures.header": "wrong headers",
    "verification_failures.checksum": "wrong checksums",
    "io_errors.read": "read errors",
    "io_errors.write": "write errors",
    "deadline_misses": "deadline misses",
    "late_moves": "late moves",
    "write_pauses": "pauses of writes",
    "dropped_records": "records not committed",
    "segment_failures": "segments not made",
    "drive_quarantines": "drive quarantines",
    "remote_rejects": "bad in the remote store",
    "switched_off": "switched off",
}
"""Series that count failures, all 0 on a healthy machine, and their names in words."""

HARMLESS = {"foreign_failures": "gone from other engines"}
"""Series that count failures which a healthy machine has too, and their names in words."""


SERIES: Mapping[str, Kind] = {
    series: metric.kind
    for metric in METRICS.values()
    for series in ([f"{metric.name}.{value}" for value in metric.values] if metric.label else [metric.name])
}
"""The kind of each series whose name is known beforehand."""


@cache
def kind_of(series: str) -> Kind | None:
    """Return the kind of a series, None where there is none of that name."""
    name, _, value = series.partition(".")
    metric = METRICS.get(name)
    if metric is not None and metric.label and not metric.values and value:
        return metric.kind
    return SERIES.get(series)


@dataclass(slots=True)
class Samples:
    """The samples of a series: their number, their sum, and the values of the first MOST_SAMPLES
    that were not taken yet."""

    count: int = 0
    total: float = 0.0
    values: list[float] = field(default_factory=list)

    def merge(self, other: Samples) -> None:
        """Add another rank's, or step's, samples."""
        self.count += other.count
        self.total += other.total
        self.values += other.values[: max(0, MOST_SAMPLES - len(self.values))]

    def all_values(self) -> list[float]:
        """Return a value for each sample. Samples beyond MOST_SAMPLES count as their mean: number
        and sum are exact."""
        rest = self.count - len(self.values)
        mean = (self.total - sum(self.values)) / rest if rest else 0.0
        return [*self.values, *[mean] * rest]


@dataclass(slots=True)
class Stats:
    """Values of series. A series that is not in the table, or is of another kind, is a programmer's
    error.

    ``changes``: rises with each change.
    """

    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    changes: int = 0

    def add(self, series: str, amount: int = 1) -> None:
        """Increase a counter."""
        assert kind_of(series) is _C, series
        if amount:
            self.counts[series] = self.counts.get(series, 0) + amount
            self.changes += 1

    def observe(self, series: str, value: float) -> None:
        """Add a sample to a histogram."""
        assert kind_of(series) is _H, series
        if series not in self.samples:
            self.samples[series] = Samples()
        samples = self.samples[series]
        samples.count += 1
        samples.total += value
        if len(samples.values) < MOST_SAMPLES:
            samples.values.append(value)
        self.changes += 1

    def merge(self, other: Stats) -> None:
        """Add the counters and samples of ``other``, and replace gauges by its."""
        for series, amount in other.counts.items():
            self.add(series, amount)
        for series, samples in other.samples.items():
            self.samples.setdefault(series, Samples()).merge(samples)
        if other.samples or other.gauges:
            self.gauges.update(other.gauges)
            self.changes += 1

    def take(self) -> Stats:
        """Return all values so far, and begin again from nothing."""
        taken = Stats(self.counts, self.samples, self.gauges, self.changes)
        self.counts, self.samples, self.gauges, self.changes = {}, {}, {}, 0
        return taken

    def __getitem__(self, series: str) -> int:
        assert kind_of(series) is Kind.COUNTER, series
        return self.counts.get(series, 0)

    def sum_of(self, series: str) -> float:
        """Return the sum of a histogram's samples."""
        assert kind_of(series) is Kind.HISTOGRAM, series
        return self.samples.get(series, Samples()).total

    @property
    def empty(self) -> bool:
        """Whether nothing was counted or measured."""
        return not (self.counts or self.samples or self.gauges)


def by_metric(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by series as values by metric. A metric with a label has an object of its own.
    For JSON that people read."""
    found: dict[str, Any] = {}
    for series in sorted(values):
        name, _, value = series.partition(".")
        if value:
            found.setdefault(name, {})[value] = values[series]
        else:
            found[name] = values[series]
    return found
