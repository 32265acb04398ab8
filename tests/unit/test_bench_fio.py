# SPDX-License-Identifier: Apache-2.0
"""fio's command line, and what is read from what it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvdisk.cli.bench import fio
from kvdisk.cli.bench.cases import Case, Flow, Layout, Unmeasured

KIB = 1024
CASE = Case(Flow.MIXED, 64 * KIB, 4, Layout.SCATTERED, 1024 * KIB)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(os.urandom(2048 * KIB))
    return made


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("layout", Layout)
def test_a_real_fio_moves_each_block_once_a_pass(file: Path, flow: Flow, layout: Layout) -> None:
    found = fio.find(file, direct=False)
    if found is None:
        assert fio.version() is None, "a machine without fio says so"
        return
    before = file.read_bytes()
    engines = [name for name, why in found.engines().items() if not why]
    assert engines and set(engines) <= set(fio.ENGINES)
    sample = found.measure(Case(flow, 64 * KIB, 4, layout, 1024 * KIB), engines[0], 3)
    assert 0 < sample.seconds < 60 and sample.cpu_seconds is None
    assert len(file.read_bytes()) == len(before) and file.read_bytes()[1024 * KIB :] == before[1024 * KIB :]
    assert (file.read_bytes() == before) == (flow is Flow.READ)


def test_a_real_failure_is_told_in_a_sentence(tmp_path: Path) -> None:
    found = fio.find(tmp_path / "absent", direct=False)
    if found is None:
        assert fio.version() is None
        return
    with pytest.raises(Unmeasured, match="fio with libaio"):
        found.measure(CASE, "libaio", 1)
    assert all("fio with" in why for why in found.engines().values())


def test_small_cases_are_moved_often_and_their_time_is_of_one(file: Path, tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text(
        '#!/bin/sh\nfor word in "$@"; do case $word in --io_size=*) size=${word#--io_size=};; esac; done\n'
        'echo "{\\"jobs\\": [{\\"error\\": 0, \\"read\\": {\\"io_bytes\\": $size, \\"runtime\\": 2400},'
        ' \\"write\\": {\\"io_bytes\\": 0, \\"runtime\\": 0}}]}"\n'
    )
    program.chmod(0o700)
    made = fio.Fio(str(program), file, direct=True)
    assert made.measure(CASE, "libaio", 1).seconds == pytest.approx(0.3), "eight times"
    large = Case(Flow.READ, 1 << 20, 4, Layout.CONTIGUOUS, 256 << 20)
    assert made.measure(large, "libaio", 1).seconds == pytest.approx(1.2), "512 MiB are enough"
    assert made.measure(large, "libaio", 5).seconds == pytest.approx(2.4)


def test_without_fio_there_is_none(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert fio.find(file, direct=True) is None and fio.version() is None


def test_the_command_line_names_the_case() -> None:
    listed = fio.arguments(CASE, "libaio", Path("place/file"), True, 3)
    for word in ("--rw=randrw", "--bs=65536", "--iodepth=4", "--size=1048576", "--io_size=3145728", "--direct=1"):
        assert word in listed
    assert "--ioengine=libaio" in listed and "--filename=place/file" in listed


def job(**fields: object) -> str:
    """What fio prints of a job, as far as it is read, with the notes that it may print before."""
    read = {"io_bytes": 3000, "runtime": 200}
    write = {"io_bytes": 1000, "runtime": 250}
    found = {"jobs": [{"error": 0, "read": read, "write": write, **fields}]}
    return "note: both iodepth >= 1 and synchronous I/O engine are selected\n" + json.dumps(found)


def test_what_is_read_from_it() -> None:
    assert fio.parse(job()) == fio.FioResult(4000, 0.25)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("fio: out of memory", "no JSON"),
        ("{", "another JSON"),
        ('{"jobs": []}', "another JSON"),
        ('{"jobs": [{"error": 0}]}', "another JSON"),
        ('{"jobs": 7}', "another JSON"),
        (job(error=5), "error 5"),
        (job(read={"io_bytes": 0, "runtime": 0}, write={"io_bytes": 0, "runtime": 0}), "too little"),
    ],
)
def test_what_is_no_measurement_is_refused(text: str, words: str) -> None:
    with pytest.raises(Unmeasured, match=words):
        fio.parse(text)
