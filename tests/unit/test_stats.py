# SPDX-License-Identifier: Apache-2.0
"""Values of metrics: merging over ranks and steps, bounds. The table, series by series:
``tests/connector/test_metrics.py``."""

from __future__ import annotations

from kvdisk.stats import MOST_SAMPLES, Stats


def test_ranks_add_up_and_taking_starts_from_nothing():
    total, rank = Stats(), Stats()
    assert total.empty
    for _ in range(3):
        rank.add("stored_blocks", 2)
        rank.observe("transfer_bytes.cpu_to_nvme", 4096)
        total.merge(rank)
    assert total["stored_blocks"] == 2 + 4 + 6
    assert total.sum_of("transfer_bytes.cpu_to_nvme") == (1 + 2 + 3) * 4096
    assert rank.samples["transfer_bytes.cpu_to_nvme"].count == 3, "what is merged is left as it was"
    taken = total.take()
    assert total.empty and not total.changes and taken["stored_blocks"] == 12
    rank.add("stored_blocks", 1)
    assert taken["stored_blocks"] == 12


def test_samples_are_bounded_and_their_number_and_sum_are_not():
    many, total = Stats(), Stats()
    for value in range(MOST_SAMPLES + 10):
        many.observe("wait_seconds", value)
    for _ in range(3):
        total.merge(many)
    samples = total.samples["wait_seconds"]
    assert samples.values == list(range(MOST_SAMPLES))
    assert (samples.count, samples.total) == (3 * (MOST_SAMPLES + 10), 3 * sum(range(MOST_SAMPLES + 10)))
