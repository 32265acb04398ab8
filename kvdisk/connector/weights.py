# SPDX-License-Identifier: Apache-2.0
"""The digest by which weight files are known: of names, sizes, headers, and 4 KiB of every tensor.

Network storage takes milliseconds for each read, and a model has tens of thousands of tensors. So
many samples are read at once, and the digest is remembered until a file changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.errors import ConfigError

logger = logging.getLogger("kvdisk.connector")

Read = Callable[[int, int, int], bytes]
"""A function like ``os.pread``: descriptor, length, offset."""

_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
_THREADS = 64
"""Threads that wait for storage: 90,000 reads of 5 ms take 7 s."""
_AT_ONCE = 16
"""Samples of a file that a thread reads before it takes others."""
_SAID_AFTER_S = 3.0
_WORTH_S = 1.0
"""Seconds that a digest must take to be remembered: a quicker one is read again rather than
trusted."""
_SETTLED_NS = 2 * 10**9
"""A file that changed a shorter time ago may change once more at the same time of its clock."""
_MOST_MEMORY_BYTES = 4096
"""Bytes of a file that remembers a digest that are read at most."""


def known_digest(files: Sequence[Path], memory: Path, read: Read = os.pread, worth_s: float = _WORTH_S) -> str:
    """Return the digest of files, read or remembered. ``memory``: a directory of this user's, made
    where that is possible. Where it cannot be written, or belongs to another user, nothing is
    remembered.

    Raises ConfigError where a file is damaged, OSError.
    """
    facts, began_ns, began_s = _facts(files), time.time_ns(), time.monotonic()
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    place = memory / f"weights-{hashlib.sha256(json.dumps([fact.path for fact in facts]).encode()).hexdigest()[:32]}"
    if remembered := _recall(place, key):
        return remembered
    digest = hashlib.sha256()
    digest_files(files, digest, read)
    taken_s = time.monotonic() - began_s
    found = digest.hexdigest()
    settled = max(max(fact.changed_ns, fact.inode_changed_ns) for fact in facts) < began_ns - _SETTLED_NS
    if taken_s >= worth_s and settled and _facts(files) == facts:
        _remember(place, key, found)
    return found


def digest_file(file: Path, digest: Any) -> None:
    """Add one file to a digest. Raises ConfigError where it is damaged, OSError."""
    digest_files([file], digest)


def digest_files(
    files: Sequence[Path], digest: Any, read: Read = os.pread, clock: Callable[[], float] = time.monotonic
) -> None:
    """Add each file's name, size, header and samples to a digest, in order, however many are read
    at once.

    Logs a line where it takes longer than a start should be silent. Raises ConfigError where a file
    is damaged, OSError.
    """
    began_s, said = clock(), False
    with ThreadPoolExecutor(_THREADS, "kvdisk-weights") as pool:
        try:
            for number, part in _in_order(pool, _parts(pool, files, read)):
                digest.update(part)
                if not said and clock() - began_s >= _SAID_AFTER_S:
                    said = True
                    text = "kvdisk reads 4 KiB of each tensor, to know the weights again: %d of %d files so far."
                    logger.info(text, number, len(files))
        finally:
            pool.shutdown(cancel_futures=True)
    if said:
        logger.info("kvdisk knows the weights after %.0f s.", clock() - began_s)


class _Plan(NamedTuple):
    """What is to be read of a file. ``head``: what comes before the samples in the digest.
    ``samples``: offset and length of each."""

    file: Path
    head: bytes
    samples: Sequence[tuple[int, int]]


_Job = Callable[[], Any]


def _in_order(pool: ThreadPoolExecutor, jobs: Iterable[_Job], most: int = 2 * _THREADS) -> Iterator[Any]:
    """Run jobs, many at once; yield their results in order."""
    running: deque[Future[Any]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= most:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _parts(pool: ThreadPoolExecutor, files: Sequence[Path], read: Read) -> Iterator[_Job]:
    """Yield jobs that return a file's number and the next bytes of the digest."""
    plans = _in_order(pool, (partial(_plan, file, read) for file in files), _THREADS)
    for number, plan in enumerate(plans):
        yield partial(_said, number, plan.head)
        for first in range(0, len(plan.samples), _AT_ONCE):
            yield partial(_read_samples, number, plan, first, read)


def _said(number: int, head: bytes) -> tuple[int, bytes]:
    return number, head


def _read_samples(number: int, plan: _Plan, first: int, read: Read) -> tuple[int, bytes]:
    with plan.file.open("rb", buffering=0) as stream:
        samples = plan.samples[first : first + _AT_ONCE]
        return number, b"".join(_read_all(stream.fileno(), length, offset, read) for offset, length in samples)


def _read_all(fd: int, length: int, offset: int, read: Read) -> bytes:
    """Read so many bytes, or up to the end of the file."""
    found = b""
    while len(found) < length and (more := read(fd, length - len(found), offset + len(found))):
        found += more
    return found


def _plan(file: Path, read: Read) -> _Plan:
    with file.open("rb", buffering=0) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        head = f"{file.name}:{file_bytes}:".encode()
        if file.suffix == ".safetensors":
            header, samples = _read_header(file, stream.fileno(), file_bytes, read)
            return _Plan(file, head + header, samples)
    # The tensors of such a file cannot be told apart without unpickling it: some of every MiB is
    # read.
    return _Plan(file, head, [(offset, _SAMPLE_BYTES) for offset in range(0, file_bytes, _SAMPLE_EVERY_BYTES)])


def _read_header(file: Path, fd: int, file_bytes: int, read: Read) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the header, and offset and length of each tensor's sample. The safetensors format is:
    u64 length, JSON, data.

    Raises ConfigError where the file is not of that format.
    """
    header_bytes = int.from_bytes(_read_all(fd, 8, 0, read), "little")
    data_bytes = file_bytes - 8 - header_bytes
    fits = data_bytes >= 0 and header_bytes <= _MOST_HEADER_BYTES
    header = _read_all(fd, header_bytes, 8, read) if fits else b""
    try:
        tensors = sorted((name, tensor) for name, tensor in json.loads(header).items() if name != "__metadata__")
        spans = [tuple(map(index, tensor["data_offsets"])) for _, tensor in tensors]
        sound = all(0 <= start <= end <= data_bytes for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ConfigError(f"kvdisk needs sound weight files, and {file} is a damaged one.")
    return header, [(8 + header_bytes + start, min(_SAMPLE_BYTES, end - start)) for start, end in spans]


# -- what is remembered --------------------------------------------------------------------------


class _Facts(NamedTuple):
    """What changes when a file does. ``inode_changed_ns``: no program can set it back."""

    path: str
    device: int
    inode: int
    size: int
    changed_ns: int
    inode_changed_ns: int


def _facts(files: Sequence[Path]) -> list[_Facts]:
    found = []
    for file in files:
        now = file.stat()
        path = str(file.absolute())
        found.append(_Facts(path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    return found


def _recall(place: Path, key: str) -> str | None:
    """Return the digest that this user remembered under a key; None where there is none, or where
    another user could have written it."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            known, found, check = stream.read(_MOST_MEMORY_BYTES).decode("ascii").split()
    except (OSError, ValueError):
        return None
    return found if (known, check) == (key, _check_of(key, found)) else None


def _remember(place: Path, key: str, found: str) -> None:
    """Write a digest. The file gets its name when it is complete."""
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        try:
            with open(fd, "w", encoding="ascii") as stream:
                stream.write(f"{key} {found} {_check_of(key, found)}\n")
            Path(temporary).replace(place)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def _check_of(key: str, found: str) -> str:
    """Return a checksum that shows that a file is complete."""
    return hashlib.sha256(f"{key} {found}".encode()).hexdigest()
