# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around kvdisk's tier behind vLLM's real manager of tiers: drives that hang or are
full, an engine that is killed, two engines in one directory. No row has a wrong byte, and nothing
waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.small_drive import fill, run_in_mounts_of_its_own, run_on_a_drive
from support.waits import WAIT_S, lives, until
from test_tier_drive import DriveBench, make

__all__ = ["make"]  # the fixture

CHUNKS = 12
MIB = 1 << 20
DRIVE_BYTES = 24 * MIB

HANGS = """
import os, sys, time
if any("mover_process" in each for each in sys.orig_argv):
    from kvdisk.device import aio
    def held(real):
        def move(*arguments):
            while os.path.exists({flag!r}):
                time.sleep(0.01)
            return real(*arguments)
        return move
    aio.serves = lambda _fd: False  # threads move, and Python can hold them up
    os.preadv, os.pwritev = held(os.preadv), held(os.pwritev)
"""
"""A ``sitecustomize`` for the mover's process: as long as a file is there no read and no write
ends."""


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Hangs the drives of movers that are started from now on while it exists."""
    flag = tmp_path / "hangs"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGS.format(flag=str(flag)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield flag
    flag.unlink(missing_ok=True)


def warm(bench: DriveBench, name: str, document: int) -> int:
    """Serve a document of which memory has nothing."""
    bench.forget_memory()
    return bench.serve(name, document, CHUNKS)


def warm_at_last(bench: DriveBench, name: str, document: int) -> None:
    """Serve a document again and again until all of it hits."""
    tries = iter(range(10**6))
    until(lambda: warm(bench, f"{name} {next(tries)}", document) == CHUNKS, "a hit")


def test_a_drive_that_hangs_while_rows_are_reused(make, flag):
    """Its loads are given up, memory gives their rows to others, and what the drive reads late goes
    nowhere."""
    bench = make(rows=64)
    for document in range(4):
        bench.serve(f"cold {document}", document, CHUNKS)
    bench.close()
    bench = make(rows=16, io_deadline_s=0.5)
    flag.touch()
    assert warm(bench, "a", 0) == 0, "it is computed"
    # A request that waits for the drive is aborted, and vLLM's caches are reset meanwhile.
    keys = bench.begin("b", 1, CHUNKS)
    bench.look("b", keys)
    bench.step()
    bench.end("b")
    for document in range(4, 8):
        assert bench.serve(f"others {document}", document, CHUNKS) == 0
    keys = bench.begin("c", 2, CHUNKS)
    bench.look("c", keys)
    bench.step()
    bench.manager.reset_cache()
    getattr(bench.manager, "on_reset_flushed", lambda: None)()
    bench.end("c")
    assert warm(bench, "d", 3) == 0
    bench.rest()
    flag.unlink()
    for document in range(4):
        bench.serve(f"after {document}", document, CHUNKS)
    assert not bench.tier.is_off
    bench.close()
    bench = make()
    for document in range(4):
        bench.serve(f"restarted {document}", document, CHUNKS)


def test_two_engines_in_one_directory_find_each_others_blocks(make):
    """As data-parallel ranks are."""
    first, second = make(), make()
    first.serve("cold", 1, CHUNKS)
    second.serve("cold", 2, CHUNKS)
    warm_at_last(second, "of the first", 1)
    warm_at_last(first, "of the second", 2)
    first.close()
    warm_at_last(second, "of one that has ended", 1)


def serve_and_die(folder: Path) -> None:
    """Store a document, and be killed with another one on its way."""
    bench = DriveBench(folder, device="posix", lookup_wait_s=600, io_deadline_s=600)
    bench.serve("cold", 1, CHUNKS)
    keys = bench.begin("more", 2, 64)
    bench.compute("more", keys)
    bench.step()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.torture
def test_an_engine_that_is_killed_between_two_steps(make, tmp_path):
    call = "import pathlib, sys, test_tier_faults; test_tier_faults.serve_and_die(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", call, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    bench = make(rows=128)
    warm_at_last(bench, "after it", 1)
    bench.serve("what was on its way", 2, 64)


def test_the_indexs_process_is_killed(make, caplog):
    bench = make()
    bench.serve("cold", 1, CHUNKS)
    pid = bench.store._parts.index.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid), "its end")
    for document in range(4):
        warm(bench, f"meanwhile {document}", document)
    bench.rest()
    assert not bench.tier.is_off
    assert [text for text in caplog.messages if "index" in text], "it is said"
    bench.close()
    bench = make()
    warm_at_last(bench, "after a restart", 1)


def test_memory_of_eight_rows(make):
    """A prompt longer than all of memory gets what fits. vLLM would load its end in the place of
    its head, and its head in that of its end, for ever."""
    bench = make()
    bench.serve("cold", 1, CHUNKS)
    bench.close()
    bench = make(rows=8)
    for number in range(3):
        keys = bench.begin(f"warm {number}", 1, CHUNKS)
        hits = bench.load(f"warm {number}", keys)
        assert 0 < hits <= 8
        bench.end(f"warm {number}")
        bench.rest()
        bench.forget_memory()


def test_many_wait_where_memory_has_eight_rows(make):
    """Requests that are promised more than there is go on, one after the other or computed."""
    bench = make()
    for document in range(6):
        bench.serve(f"cold {document}", document, 4)
    bench.close()
    bench = make(rows=8)
    keys = {f"warm {document}": bench.begin(f"warm {document}", document, 4) for document in range(6)}
    waiting, hits, end_s = dict(keys), 0, time.monotonic() + WAIT_S
    while waiting:
        assert time.monotonic() < end_s, "they wait for ever"
        for name in list(waiting):
            found = bench.look(name, waiting[name])
            if found is None:
                continue
            if found:
                bench.use(name, waiting[name][:found])
            hits += found
            del waiting[name]
            bench.step(name)
            bench.end(name)
        bench.step()
    assert hits > 8, "rows were used again"


# -- full drives: this file is also the program that mounts them -----------------------------------


@contextmanager
def opened(drive: Path, **settings: object) -> Iterator[DriveBench]:
    settings |= {"device": "posix", "nvme_admission": "all", "lookup_wait_s": 600, "io_deadline_s": 600}
    bench = DriveBench(drive, **settings)
    try:
        yield bench
    finally:
        bench.close()


def a_cap_larger_than_the_drive(drive: Path) -> None:
    """What there is room for is stored, and the rest is computed."""
    with opened(drive, nvme_bytes="100GiB", segment_bytes="1MiB") as bench:
        for document in range(40):
            bench.serve(f"cold {document}", document, 64)  # 20 MiB of rows
        assert warm(bench, "warm", 39) == CHUNKS
    with opened(drive, nvme_bytes="100GiB", segment_bytes="1MiB") as bench:
        assert warm(bench, "restarted", 39) == CHUNKS


def full_at_the_start(drive: Path) -> None:
    """vLLM goes on, and stores once there is room and it is started again."""
    ballast = fill(drive)
    with opened(drive) as bench:
        for document in range(3):
            bench.serve(f"cold {document}", document, CHUNKS)
            assert bench.serve(f"memory {document}", document, CHUNKS) == CHUNKS
    ballast.unlink()
    with opened(drive, segment_bytes="1MiB") as bench:
        bench.serve("cold", 1, CHUNKS)
        assert warm(bench, "warm", 1) == CHUNKS


def full_while_it_runs(drive: Path) -> None:
    """Others take all that is free: what is stored stays right, and the next blocks take its
    place."""
    with opened(drive, segment_bytes="1MiB") as bench:
        bench.serve("cold", 0, CHUNKS)
        ballast = fill(drive)
        for document in range(1, 40):
            bench.serve(f"cold {document}", document, 64)
            warm(bench, f"warm {document}", document % 7)
        assert not bench.tier.is_off
        ballast.unlink()
        warm_at_last(bench, "with room", 50)
    with opened(drive, segment_bytes="1MiB") as bench:
        assert warm(bench, "restarted", 50) == CHUNKS


SCENARIOS = (a_cap_larger_than_the_drive, full_at_the_start, full_while_it_runs)


@pytest.mark.torture
def test_on_a_full_drive():
    run_in_mounts_of_its_own(__file__)


if __name__ == "__main__":
    for scenario in SCENARIOS:
        run_on_a_drive(scenario, DRIVE_BYTES)
