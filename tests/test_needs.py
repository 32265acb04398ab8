# SPDX-License-Identifier: Apache-2.0
"""What a run of tests says of those whose library or compiler this machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import needs

from kvdisk.device import aio

TESTS = """
import pytest
from support.needs import need

@pytest.fixture(scope="session")
def server():
    need("the server needs libserver.so.1")

@pytest.mark.parametrize("number", range(3))
def test_of_the_server(server, number):
    pass

@pytest.mark.skip(reason="only root can")
def test_of_root():
    pass

def test_of_nothing():
    assert {outcome}
"""


def run(tmp_path: Path, *options: str, outcome: bool = True, **environment: str) -> list[str]:
    """Run them as pytest runs ours; return the lines that it prints."""
    (tmp_path / "test_it.py").write_text(TESTS.format(outcome=outcome))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.needs", f"--rootdir={tmp_path}", "-c", os.devnull]
    added = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    kept = {name: value for name, value in os.environ.items() if name not in {needs.NEED_ALL, "PYTEST_ADDOPTS"}}
    done = subprocess.run(
        [*command, *options, "test_it.py"], cwd=tmp_path, env=kept | added, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


LISTED = "kvdisk: skipped 4 tests. 3: the server needs libserver.so.1; 1: only root can"


@pytest.mark.parametrize("options", [(), ("-n", "2", "-p", "xdist")])
def test_a_run_ends_with_what_was_skipped_and_why(tmp_path, options):
    *_, listed, last = run(tmp_path, *options)
    assert listed == LISTED
    assert last.startswith("1 passed, 4 skipped in ")


def test_it_is_listed_after_what_failed(tmp_path):
    *_, failed, listed, last = run(tmp_path, outcome=False)
    assert failed.startswith("FAILED test_it.py::test_of_nothing") and listed == LISTED
    assert last.startswith("1 failed, 4 skipped in ")


def test_where_all_is_needed_what_is_missing_fails(tmp_path):
    *_, listed, last = run(tmp_path, **{needs.NEED_ALL: "1"})
    assert last.startswith("1 passed, 1 skipped, 3 errors in ")
    assert listed == "kvdisk: skipped 1 test. 1: only root can"


def test_without_a_compiler_the_sentence_is_the_one_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(aio, "__file__", str(tmp_path / "aio.py"))
    monkeypatch.setattr(aio, "library", aio.library.__wrapped__)
    with pytest.raises(OSError, match=r"\w") as raised:
        aio.library()
    assert needs.why_not_compiled() == needs.why_no_queue() == raised.value.strerror


def test_without_a_library_of_mooncakes_client_the_sentence_names_its_package(tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    said = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "mooncake" / "store.py").write_text(f"raise ImportError({said!r})")
    monkeypatch.syspath_prepend(tmp_path)
    assert "package libibverbs1" in str(needs.why_no_mooncake())
