# SPDX-License-Identifier: Apache-2.0
"""What the comparisons ask and end with; ``tests/connector/test_torture_compare.py`` runs it."""

from __future__ import annotations

from xml.etree import ElementTree

import compare_offloading
import compare_returning
import compared_engines
import connectors
import pytest
from compare_offloading import ALONE, COMPUTED, FLIPPED, IN_MEMORY, KILLED, ON_DRIVE, OTHER_WEIGHTS, Found, Work
from engine_child import NEAR_TIE, Answer, agrees

MIB = 1 << 20
CAP = 64 * MIB
TIMES = {1000: 1.234, 4000: 5.678}


def found(way, *, is_ours=False, wrong=0, drive_bytes=CAP):
    return Found(
        way,
        is_ours,
        first_s=dict.fromkeys((COMPUTED, IN_MEMORY, ON_DRIVE), TIMES),
        cached=dict.fromkeys((IN_MEMORY, ON_DRIVE), dict.fromkeys(TIMES, 0.96)),
        rates={"nothing known": 12345.6},
        wrong={COMPUTED: 0, FLIPPED: wrong, OTHER_WEIGHTS: wrong, KILLED: 0},
        asked={COMPUTED: 6, FLIPPED: 3, OTHER_WEIGHTS: 3, KILLED: 3},
        drive_bytes=drive_bytes,
    )


def test_it_blames_kvdisk_alone():
    others = [found(ALONE, drive_bytes=None), found("memory, fs", wrong=3, drive_bytes=3 * CAP)]
    assert compare_offloading.verdict([*others, found("kvdisk", is_ours=True)], CAP) == []
    ours = found("kvdisk", is_ours=True, wrong=1, drive_bytes=CAP + 1)
    ours.failed = "the engine ended"
    said = " ".join(compare_offloading.verdict([*others, ours], CAP))
    assert said.count("1 wrong answers") == 2 and "before all was done" in said and "over the cap" in said


def test_its_table_has_a_column_for_each_way_and_a_row_for_each_figure():
    all_found = [found(ALONE), found("kvdisk", is_ours=True), Found("LMCache", failed="it did not start")]
    lines = compare_offloading.markdown_of(all_found, compare_offloading.rows_of(all_found, CAP)).splitlines()
    assert {line.count("|") for line in lines} == {5}
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert cells["first token of 4,000, computed"] == ["5.678 s", "5.678 s", ""]
    assert cells["first token of 1,000, from the drive"] == ["1.234 s (96%)", "1.234 s (96%)", ""]
    assert cells[f"wrong answers, {FLIPPED}"] == ["0 of 3", "0 of 3", ""]
    assert cells["on the drive, 3 times 64 MiB written"] == ["64 MiB", "64 MiB", ""]


def test_its_picture_is_one():
    svg = compare_offloading.picture_of([found(ALONE), found("memory, fs"), Found("LMCache")])
    bars = ElementTree.fromstring(svg)  # noqa: S314 - our own
    shown = [element.text for element in bars.iter() if element.text and element.text.strip()]
    assert shown.count("5.678 s") == 6 and "memory, fs" in shown and "1.234 s" not in shown
    assert "LMCache" not in shown, "nothing is known of it"


def test_every_way_is_asked_the_same_and_more_than_the_cap():
    first, second = (Work.make((64, 256), 2, 1 << 20, 1024, 512) for _ in range(2))
    assert first == second
    assert [len(prompt) for prompts in first.timed.values() for prompt in prompts] == [64, 64, 256, 256]
    assert first.asked_again == first.timed[64]
    assert sum(map(len, first.much)) * 1024 >= 3 << 20
    assert first.memory_bytes > sum(len(prompt) for prompts in first.timed.values() for prompt in prompts) * 1024


@pytest.mark.parametrize(("near", "same"), [(NEAR_TIE["cpu"], False), (NEAR_TIE["cuda"], True)])
def test_tokens_may_differ_from_where_two_were_as_near_as_rounding(near, same):
    wanted = Answer([1, 2, 3], 0, 1.0, [2.0, 0.01, 2.0])
    assert agrees(wanted, Answer([1, 2, 3], 9, 0.1), near)
    assert agrees(wanted, Answer([1, 7, 8], 9, 0.1), near) == same
    assert not agrees(wanted, Answer([7, 2, 3], 9, 0.1), near)
    assert not agrees(wanted, Answer([1, 2, 4], 9, 0.1), near)
    assert not agrees(wanted, Answer([1, 2], 9, 0.1), near)


def test_returning_users_have_their_rows_and_kvdisk_alone_is_blamed(tmp_path):
    got = {"2": compare_returning.Returned(8, 0.97, 0.1, 0.25, 0), KILLED: compare_returning.Returned(8, 0.5, 1, 2, 3)}
    ours = compare_returning.Found("kvdisk", is_ours=True, returned=got)
    other = compare_returning.Found("LMCache", returned={"2": got[KILLED]}, failed="it ended")
    assert compare_returning.rows_of([ours, other]) == [
        ("2 times the memory", ["97%, 0.10 / 0.25 s", "50%, 1.00 / 2.00 s, **3 wrong**"]),
        (KILLED, ["50%, 1.00 / 2.00 s, **3 wrong**", ""]),
    ]
    assert compare_returning.verdict([ours, other]) == [f"kvdisk, {KILLED}: 3 wrong answers."]


@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_the_kv_of_those_who_return_is_so_many_times_the_memory_or_a_little_more(times):
    returning = object.__new__(compare_returning.Returning)
    returning.memory_bytes, returning.token_bytes = 16 * MIB, 8192
    returning.all_users = [[0] * 528 for _ in range(100)]
    users = len(returning.users(times))
    assert (users - 1) * 528 * 8192 < times * 16 * MIB <= users * 528 * 8192


def test_a_way_that_is_not_here_is_refused_and_those_that_are_are_named(capsys):
    parser = compared_engines.options_for("", connectors.ALL_WAYS)
    assert parser.parse_args(["--only", "kvdisk", "memory, fs"]).only == ["kvdisk", "memory, fs"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "KVDISK"])
    assert "'kvdisk as tier'" in capsys.readouterr().err


def test_what_vllm_trips_over_in_lmcaches_numba_is_a_dictionary(monkeypatch):
    """vLLM asks for ``vars()`` of all that modules hold."""
    monkeypatch.syspath_prepend(connectors.ROOT / "tests" / "connector")
    import host_lmcache

    ffi = pytest.importorskip("llvmlite.binding.ffi")
    host_lmcache.plain_library(ffi)
    assert vars(ffi.lib).get("kernel") is None and callable(ffi.lib.LLVMPY_GetVersionInfo)


def test_what_stands_for_vllms_worker_is_named_where_there_is_no_gpu_alone(tmp_path, monkeypatch):
    fs = connectors.Offloading("memory, fs", tier="fs")
    for device, spec in (("cpu", "HostTieringSpec"), ("cuda", "TieringOffloadingSpec")):
        monkeypatch.setattr(connectors, "vllm_device", lambda device=device: device)
        extra = fs.transfer_config(tmp_path, 64, CAP)["kv_connector_extra_config"]
        assert extra["spec_name"] == spec and extra["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]
        ours = connectors.Offloading("", tier="kvdisk").transfer_config(tmp_path, 64, CAP)["kv_connector_extra_config"]
        assert ours["secondary_tiers"][0]["nvme_bytes"] == CAP


@pytest.mark.parametrize(("cap", "expected"), [(64 * MIB, 16 * MIB), (512 * MIB, 32 * MIB), (1 << 40, 1 << 30)])
def test_a_store_has_sixteen_segments_or_more(cap, expected):
    assert connectors.segment_bytes(cap) == expected


def test_it_waits_until_a_directory_rests(tmp_path, monkeypatch):
    sizes = iter([1, 2, 3, 3, 4])
    monkeypatch.setattr(connectors, "QUIET_S", 0.0)
    monkeypatch.setattr(connectors, "taken_bytes", lambda _: next(sizes))
    connectors.await_quiet(tmp_path)
    assert next(sizes) == 4
