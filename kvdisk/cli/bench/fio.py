# SPDX-License-Identifier: Apache-2.0
"""fio, a program of its own that moves bytes as fast as the drive takes them: the limit.

It is given what the devices have: buffers in hugepages, and, with io_uring, buffers and file registered before the
first transfer. Without, its reads can be half as fast, and would be no limit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from kvdisk.cli.bench.cases import Case, Flow, Layout, Sample, Unmeasured

ENGINES = {
    "io_uring": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
    "io_uring, unregistered": ("--ioengine=io_uring",),
    "libaio": ("--ioengine=libaio",),
}
"""Ways of fio, by the name that the tables have."""
MISSING = "fio is not installed (Debian, Ubuntu: apt-get install fio): there is no limit to compare with."
_KINDS = {
    (Flow.READ, Layout.CONTIGUOUS): "read",
    (Flow.WRITE, Layout.CONTIGUOUS): "write",
    (Flow.MIXED, Layout.CONTIGUOUS): "rw",
    (Flow.READ, Layout.SCATTERED): "randread",
    (Flow.WRITE, Layout.SCATTERED): "randwrite",
    (Flow.MIXED, Layout.SCATTERED): "randrw",
}
_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_LONGEST_S = 300
_ENOUGH_BYTES, _MOST_TIMES = 512 << 20, 8
_PROBE_BYTES = 1 << 20


class FioResult(NamedTuple):
    """What a job of fio did: bytes moved, and the time from its first to its last."""

    moved_bytes: int
    seconds: float


class Fio:
    """fio over the file of a run. ``direct``: see ``Scratch``. Any thread may call; calls wait for fio to end."""

    def __init__(self, program: str, file: Path, direct: bool) -> None:
        self._program = program
        self._file = file
        self._direct = direct

    def engines(self) -> dict[str, str]:
        """Try each of ENGINES with one small read; return by name why it cannot be used, "" where it can.

        The unregistered way is left out where the registered one works.
        """
        case = Case(Flow.READ, _PROBE_BYTES, 1, Layout.CONTIGUOUS, _PROBE_BYTES)
        found: dict[str, str] = {}
        for engine in ENGINES:
            if engine == "io_uring, unregistered" and not found["io_uring"]:
                continue
            try:
                self.measure(case, engine, 1)
                found[engine] = ""
            except Unmeasured as error:
                found[engine] = str(error)
        return found

    def measure(self, case: Case, engine: str, passes: int) -> Sample:
        """Move the case's bytes so many times, and return what that takes. Raises Unmeasured where fio fails.

        It moves small cases several times as often, and its time is divided by that: the start of its thread is in
        there, and it counts in milliseconds.
        """
        more = min(_MOST_TIMES, -(-_ENOUGH_BYTES // (case.total_bytes * passes)))
        command = [self._program, *arguments(case, engine, self._file, self._direct, passes * more)]
        try:
            done = subprocess.run(  # noqa: S603 - an installed program, and our own words
                command, capture_output=True, text=True, timeout=_LONGEST_S, check=False, env=os.environ | _HUGE
            )
        except subprocess.TimeoutExpired:
            raise Unmeasured(f"fio with {engine} took more than {_LONGEST_S} s.") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise Unmeasured(f"fio with {engine}: {said[0] if said else f'exit code {done.returncode}'}")
        result = parse(done.stdout)
        wanted = case.total_bytes * passes * more
        if result.moved_bytes != wanted:
            raise Unmeasured(f"fio with {engine} moved {result.moved_bytes} bytes, not {wanted}.")
        return Sample(result.seconds / more)


def find(file: Path, direct: bool) -> Fio | None:
    """Return fio where it is installed."""
    program = shutil.which("fio")
    return None if program is None else Fio(program, file, direct)


def version() -> str | None:
    """Return what fio calls itself; None where it is not installed."""
    program = shutil.which("fio")
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None


def arguments(case: Case, engine: str, file: Path, direct: bool, passes: int) -> list[str]:
    """Return the command line: every block of the case once a pass, in the file as it is, nothing else."""
    kind = _KINDS[case.flow, case.layout]
    return [
        "--name=limit",
        f"--filename={file}",
        f"--size={case.total_bytes}",
        f"--io_size={case.total_bytes * passes}",
        f"--rw={kind}",
        "--rwmixread=50",
        f"--bs={case.block_bytes}",
        f"--iodepth={case.depth}",
        *ENGINES[engine],
        f"--direct={int(direct)}",
        "--thread",
        "--fallocate=none",
        "--allow_file_create=0",
        "--scramble_buffers=0",
        "--gtod_reduce=1",
        "--output-format=json",
    ]


def parse(text: str) -> FioResult:
    """Read the JSON that fio printed, behind any notes. Raises Unmeasured where it is none, or its job failed."""
    start = text.find("{")
    if start < 0:
        raise Unmeasured("fio printed no JSON.")
    try:
        job = json.loads(text[start:])["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        number = job["error"]
    except (ValueError, LookupError, TypeError) as error:
        raise Unmeasured(f"fio printed another JSON than expected ({type(error).__name__}: {error}).") from None
    if number:
        raise Unmeasured(f"fio's job failed with error {number}.")
    if moved <= 0 or seconds <= 0:
        raise Unmeasured(f"fio moved {moved} bytes in {seconds} s: too little to measure.")
    return FioResult(moved, seconds)
