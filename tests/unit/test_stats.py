# SPDX-License-Identifier: Apache-2.0
"""The table of metrics and its values: names, merging over ranks and steps, bounds."""

from __future__ import annotations

import pytest

from kvdisk.stats import MOST_SAMPLES, Stats


def test_a_series_is_in_the_table_and_used_as_what_it_is():
    stats = Stats()
    stats.add("drive_read_bytes.17", 5)
    assert stats["drive_read_bytes.17"] == 5
    for name in ("", "nothing", "hit_tokens", "hit_tokens.", "hit_tokens.gpu", "drive_read_bytes", "wait_seconds"):
        with pytest.raises(AssertionError):
            stats.add(name)
    for misuse in (
        lambda: stats.observe("stored_blocks", 1.0),
        lambda: stats["wait_seconds"],
        lambda: stats.sum_of("stored_blocks"),
    ):
        with pytest.raises(AssertionError):
            misuse()


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
    for stats, times in ((many, 1), (total, 3)):
        samples = stats.samples["wait_seconds"]
        assert samples.values == list(range(MOST_SAMPLES))
        assert samples.count == times * (MOST_SAMPLES + 10)
        assert samples.total == times * sum(range(MOST_SAMPLES + 10))
