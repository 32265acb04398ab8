# SPDX-License-Identifier: Apache-2.0
"""Bugs against what docs/ARCHITECTURE.md says that holds, each with the test that must catch it.

A pytest plugin: with ``KVDISK_PLANTED`` it plants the bug of that name before a test is collected.
A run whose tests never come to the bug ends with ``UNREACHED``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from support.planting import Plant, Planter

NAME = "KVDISK_PLANTED"
UNREACHED = 9

Real = Callable[..., Any]


class Bug(NamedTuple):
    """``holds``: what it is against, in a few words; a number is the invariant's. ``test``: who
    catches it."""

    holds: str
    plant: Plant
    test: str


def found(owner: str) -> Any:
    """Return a module, or a class of one: ``module:Class``."""
    module, _, name = owner.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def instead(owner: str, name: str, fake: Callable[..., Any]) -> Plant:
    """Call ``fake`` with the real function, and what that is called with."""
    return lambda planter: planter.replace(found(owner), name, fake)


def nothing(owner: str, name: str, result: object = None) -> Plant:
    """Do nothing, and return ``result``."""
    return lambda planter: planter.skip(found(owner), name, result)


def take_any_block(planter: Planter) -> None:
    """A sound header of whatever block is taken for that of the one that is asked for."""
    header = import_module("kvdisk.device.header")
    planter.replace_in(header, "named_checksum", header, "_encode", lambda real, *args: real(*args)[:8])


def forget_the_epoch(real: Real, namespace: Any, *rest: Any) -> Any:
    return real(namespace._replace(epoch=0), *rest)


def give_back_all_but_the_first(real: Real, pool: Any, slots: Any) -> None:
    real(pool, slots[1:])


def forget_losses(planter: Planter) -> None:
    """Nothing that leaves a tier is noted."""

    def keep(real: Real, catalog: Any, *args: Any) -> None:
        losses = catalog.losses
        real(catalog, *args)
        catalog.losses = losses

    for name in ("_change", "hide", "hide_all"):
        planter.replace(found("kvdisk.manager.catalog:Catalog"), name, keep)


def write_unsynced(_real: Real, path: Any, value: Any) -> None:
    paths = found("kvdisk.device.paths")
    paths.replace_file(path, [paths.encode_json(value)])


def count_on(_real: Real, writer: Any, operations: Any, _error: Any) -> None:
    """A commit that failed is told as one that succeeded."""
    writer._held = []
    writer._advance(operations)


def submit_without(field: str) -> Callable[..., Any]:
    return lambda real, mover, plan: real(mover, replace(plan, **{field: ()}))


def raise_on(_real: Real, _connector: Any, error: Exception, _hook: str) -> None:
    raise error


BUGS: dict[str, Bug] = {
    # -- verified loads --
    "a checksum that is always the same": Bug(
        "7: bytes are verified, or not served",
        nothing("kvdisk.device.header", "payload_checksum", bytes(16)),
        "tests/unit/test_header.py::test_a_flipped_bit_is_refused_anywhere_in_the_header_and_the_payload",
    ),
    "a header's own checksum that is always the same": Bug(
        "7: bytes are verified, or not served",
        nothing("kvdisk.device.header", "xxh3_64_intdigest", 0),
        "tests/unit/test_header.py::test_a_flipped_bit_is_refused_anywhere_in_the_header_and_the_payload",
    ),
    "another block taken for the one that is asked for": Bug(
        "3: a READY copy's slot has its key's bytes",
        take_any_block,
        "tests/unit/test_header.py::test_another_block_is_refused",
    ),
    "a load that nobody verifies": Bug(
        "7: bytes are verified, or not served",
        nothing("kvdisk.worker.slot_headers:SlotHeaders", "check", ({}, [])),
        "tests/unit/test_mover_remote.py::test_each_bad_object_fails_alone_with_its_reason",
    ),
    "what a drive read is not verified": Bug(
        "7: bytes are verified, or not served",
        nothing("kvdisk.worker.slot_headers", "check_slot"),
        "tests/simulation/test_simulation.py::test_what_is_served_is_right_and_nothing_is_left_over",
    ),
    # -- the remote store --
    "objects of the remote store are not verified": Bug(
        "7: bytes are verified, or not served",
        nothing("kvdisk.worker.slot_headers", "adopt_slot"),
        "tests/unit/test_mover_remote.py::test_each_bad_object_fails_alone_with_its_reason",
    ),
    "objects of other weights have the same name": Bug(
        "a reset serves nothing from before",
        instead("kvdisk.worker.slot_headers", "object_name", forget_the_epoch),
        "tests/unit/test_mover_remote.py::test_of_another_epoch_nothing_is_found",
    ),
    "a remote store that fails is asked on": Bug(
        "the remote store holds nobody up",
        nothing("kvdisk.remote.base:Health", "end", False),
        "tests/unit/test_remote_client.py::test_a_store_that_fails_most_of_a_batch_is_left_alone",
    ),
    # -- slots --
    "a slot that awaits a commit is handed out": Bug(
        "2: a committed record's slot has its key's bytes",
        instead("kvdisk.manager.pool:SlotPool", "retain", lambda _real, pool, slots, _ticket: pool.release(slots)),
        "tests/unit/test_pool.py::test_each_slot_is_in_one_place_and_runs_are_cut_as_short_as_they_can_be",
    ),
    "a slot that is never given back": Bug(
        "1: a slot is free, awaits a commit, or is held by one copy",
        instead("kvdisk.manager.pool:SlotPool", "release", give_back_all_but_the_first),
        "tests/unit/test_pool.py::test_each_slot_is_in_one_place_and_runs_are_cut_as_short_as_they_can_be",
    ),
    # -- pins, eviction --
    "a head that leaves before what follows it": Bug(
        "a copy leaves only when nothing in its tier follows it",
        nothing("kvdisk.manager.eviction:TailFirst", "_is_followed", False),
        "tests/unit/test_tail_first.py::test_of_any_tree_the_tails_leave_first_and_nothing_is_stuck",
    ),
    "pins of a request's sender that do nothing": Bug(
        "blocks that a sender pins outlast others",
        nothing("kvdisk.manager.kv_hints:KVHints", "apply"),
        "tests/unit/test_kv_hints.py::test_what_is_kept_outlasts_what_is_not_until_its_time_is_over",
    ),
    "a lookup that remembers what has left": Bug(
        "a hit is promised only of what is there",
        forget_losses,
        "tests/unit/test_prefix_match.py::test_what_is_remembered_is_what_would_be_found",
    ),
    # -- jobs, fences --
    "a job that is settled when the first rank has answered": Bug(
        "5: a job is settled once, when every rank has answered",
        instead("kvdisk.manager.jobs:Transfers", "__init__", lambda real, transfers, _ranks: real(transfers, 1)),
        "tests/simulation/test_simulation.py::test_what_is_served_is_right_and_nothing_is_left_over",
    ),
    "a fence that no rank hears of": Bug(
        "6: no GPU block is overwritten while a store reads it",
        instead("kvdisk.worker.mover:Mover", "submit", submit_without("fence")),
        "tests/unit/test_mover.py::test_fenced_stores_go_before_all_else",
    ),
    "a fence that is never planned": Bug(
        "6: no GPU block is overwritten while a store reads it",
        instead(
            "kvdisk.manager.jobs:StoreSources",
            "take_fence",
            lambda real, sources, _overwritten: real(sources, ()) and (),
        ),
        "tests/simulation/test_simulation.py::test_what_is_served_is_right_and_nothing_is_left_over",
    ),
    "a load of before a reset that is reported as right": Bug(
        "a reset serves nothing from before",
        instead("kvdisk.worker.mover:Mover", "submit", submit_without("void")),
        "tests/unit/test_mover_failures.py::test_void_reaches_a_result_that_nobody_has_polled_for",
    ),
    "late reads without bound": Bug(
        "8: every queue is bounded",
        nothing("kvdisk.worker.runner:Runner", "_give_up_late", False),
        "tests/unit/test_mover_late.py::test_late_reads_are_bounded_and_then_nothing_starts_on_their_drive",
    ),
    "a drive that fails and is never left alone": Bug(
        "a drive that fails is quarantined",
        nothing("kvdisk.manager.segments:Drives", "note_read_result"),
        "tests/unit/test_drive_health.py::test_only_failures_in_a_row_quarantine_a_drive_and_one_that_is_tried_again",
    ),
    # -- resets --
    "a reset that forgets nothing": Bug(
        "a reset serves nothing from before",
        nothing("kvdisk.manager.manager:TierManager", "reset"),
        "tests/connector/test_scheduler_resets.py::test_what_is_served_after_a_reset",
    ),
    # -- bounds --
    "a store that may exceed its caps": Bug(
        "9: the allocated bytes never exceed the caps",
        nothing("kvdisk.device.cap:Stock", "exceeds", False),
        "tests/unit/test_cap.py::test_three_engines_of_two_namespaces_fill_the_store_to_the_cap_and_no_further",
    ),
    "a live engine's store that is deleted for room": Bug(
        "9: the allocated bytes never exceed the caps",
        instead("kvdisk.device.cap:Stock", "unowned", lambda _real, stock: list(stock.homes)),
        "tests/unit/test_cap.py::test_three_engines_of_two_namespaces_fill_the_store_to_the_cap_and_no_further",
    ),
    "the newest store that is deleted first": Bug(
        "room is made by deleting what was used longest ago",
        instead(
            "kvdisk.device.cap:Stock",
            "unowned_to_delete",
            lambda real, stock, fingerprint: real(stock, fingerprint)[::-1],
        ),
        "tests/unit/test_cap.py::test_other_namespaces_go_first_and_the_oldest_of_them",
    ),
    "a segment whose bytes are not allocated": Bug(
        "9: the allocated bytes never exceed the caps",
        instead("os", "posix_fallocate", lambda _real, fd, _at, size: os.ftruncate(fd, size)),
        "tests/unit/test_segment.py::test_a_segment_is_made_whole_allocated_and_private",
    ),
    "a full drive that keeps what was begun": Bug(
        "9: the allocated bytes never exceed the caps",
        instead("kvdisk.device.segment", "_discard", lambda _real, fd, _path: os.close(fd)),
        "tests/unit/test_segment.py::test_a_full_drive_gives_everything_back",
    ),
    "a budget that is never spent": Bug(
        "no day writes more than its budget",
        nothing("kvdisk.manager.write_budget:WriteBudget", "spend", False),
        "tests/unit/test_write_budget.py::test_no_24_hours_see_more_than_the_budget_and_all_of_it_can_be_used",
    ),
    "an index that takes puts beyond its queue": Bug(
        "8: a full queue means don't store, never wait",
        nothing("kvdisk.index.lmdb_index:LmdbIndex", "_takes_puts", True),
        "tests/conformance/test_index.py::TestLmdbIndex::test_a_full_queue_refuses_puts_only",
    ),
    # -- admission --
    "one request too few for admission": Bug(
        "reuse(n) admits what n requests wanted",
        instead(
            "kvdisk.manager.admission:AdmitReused",
            "__init__",
            lambda real, policy, history, needed: real(policy, history, needed - 1),
        ),
        "tests/unit/test_admission.py::test_distinct_requests_count_once_each",
    ),
    "an admission that lets all in": Bug(
        "learned admits what brings more than what leaves for it",
        instead("kvdisk.manager.admission:AdmitLearned", "admits", lambda _real, _self, keys: [True] * len(keys)),
        "tests/unit/test_admission.py::TestLearned::test_then_what_brings_more_than_what_leaves",
    ),
    "uses that rise along a chain": Bug(
        "no block has more uses than the one before it",
        nothing("kvdisk.manager.reuse:ReuseHistory", "_raise"),
        "tests/unit/test_reuse.py::test_a_head_that_was_forgotten_has_the_uses_of_what_follows_it",
    ),
    # -- crashes, restarts --
    "a commit that failed and is told as one that succeeded": Bug(
        "2: a committed record's slot has its key's bytes",
        instead("kvdisk.index.commit_writer:CommitWriter", "_deal_without_puts", count_on),
        "tests/unit/test_commit_writer.py::test_failed_puts_are_dropped_with_what_they_were_to_replace_and_the_rest_is_committed",
    ),
    "an index of an earlier boot that is trusted": Bug(
        "a machine that stopped has its index rebuilt",
        nothing("kvdisk.device.home", "index_is_sound", True),
        "tests/unit/test_home.py::test_after_a_clean_end_the_sum_of_the_index_decides_in_any_boot",
    ),
    "a clean end that is said before the bytes are there": Bug(
        "a clean end survives a stop of the machine",
        nothing("kvdisk.device.paths", "sync_tree"),
        "tests/unit/test_home.py::test_clean_is_said_after_all_bytes_are_synced",
    ),
    "a control file that has its name before its bytes": Bug(
        "a killed process loses nothing that was committed",
        instead("kvdisk.device.paths", "write_control", write_unsynced),
        "tests/unit/test_control.py::test_a_control_file_has_its_name_after_its_bytes_are_on_the_drive",
    ),
    "a rebuild that takes an older block": Bug(
        "2: a committed record's slot has its key's bytes",
        instead("kvdisk.device.rebuild", "newest", lambda _real, blocks: blocks),
        "tests/unit/test_header_columns.py::test_of_each_name_the_newest_becomes_a_record",
    ),
    "a rebuild that asks one rank only": Bug(
        "2: a committed record's slot has its key's bytes on every rank",
        instead("kvdisk.device.rebuild", "agreed", lambda _real, one, _other: one),
        "tests/unit/test_recovery.py::test_what_is_not_sound_on_every_rank_is_no_block",
    ),
    # -- owners, namespaces --
    "a living owner's store that is taken over": Bug(
        "a store has one owner",
        instead("kvdisk.device.paths", "try_lock", lambda real, fd, kind: real(fd, kind) or True),
        "tests/unit/test_home.py::test_a_living_owner_is_left_alone_and_a_dead_ones_home_is_taken_over",
    ),
    "a store of another model that is taken over": Bug(
        "the fingerprint tells whose bytes are alike",
        nothing("kvdisk.device.control:HomeRecord", "suits", True),
        "tests/unit/test_home.py::test_the_fullest_home_that_fits_is_taken_over",
    ),
    "weights that are not in the fingerprint": Bug(
        "the fingerprint tells whose bytes are alike",
        nothing("kvdisk.connector.model_weights", "known_digest", "0" * 32),
        "tests/connector/test_start.py::test_whatever_changes_the_bytes_changes_the_fingerprint",
    ),
    # -- errors --
    "an error of ours that reaches the engine": Bug(
        "an error of ours switches kvdisk off, and the engine goes on",
        instead("kvdisk.connector.connector:KVDiskConnector", "switch_off", raise_on),
        "tests/connector/test_switched_off.py::test_an_error_in_a_hook",
    ),
}


# -- the plugin ------------------------------------------------------------------------------------

_planters: list[Planter] = []


def pytest_configure() -> None:
    """Plant the bug that is named, if one is."""
    if name := os.environ.get(NAME):
        _planters.append(Planter(pytest.MonkeyPatch()))
        BUGS[name].plant(_planters[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Say where no test has come to the bug."""
    for planter in _planters:
        planter.patch.undo()
        if not planter.reached:
            session.exitstatus = UNREACHED
