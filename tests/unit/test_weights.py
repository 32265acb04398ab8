# SPDX-License-Identifier: Apache-2.0
"""The digest of weight files is that of reading one tensor after the other, however many are read
at once, and is remembered only as long as no file changes."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waits import WAIT_S

from kvdisk.connector import weights
from kvdisk.connector.weights import digest_files, known_digest
from kvdisk.errors import ConfigError

CHOSEN = random.Random(5)
LONG_AGO_S = 1_600_000_000


def make_safetensors(file: Path, tensors: int) -> Path:
    """Write a file of so many tensors, in another order than their names', some empty."""
    sizes = [CHOSEN.choice([0, 1, 100, 4096, 5000]) for _ in range(tensors)]
    ends = list(itertools.accumulate(sizes, initial=0))
    names = [f"layer.{at}.weight" for at in range(tensors)]
    CHOSEN.shuffle(names)
    described = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        for name, size, start in zip(names, sizes, ends, strict=False)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | described).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + CHOSEN.randbytes(ends[-1]))
    return file


def one_after_the_other(files: list[Path]) -> str:
    """The digest, read as plainly as can be."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode())
        if file.suffix != ".safetensors":
            for offset in range(0, len(content), 1 << 20):
                digest.update(content[offset : offset + 4096])
            continue
        begin = 8 + int.from_bytes(content[:8], "little")
        digest.update(content[8:begin])
        for name, tensor in sorted(json.loads(content[8:begin]).items()):
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                digest.update(content[begin + start : begin + end][:4096])
    return digest.hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "model").mkdir()
    many = [make_safetensors(tmp_path / "model" / f"{at}.safetensors", count) for at, count in enumerate((900, 1, 37))]
    other = tmp_path / "model" / "pytorch_model.bin"
    other.write_bytes(CHOSEN.randbytes((3 << 20) + 5))
    return [*many, other]


def read_digest(files: list[Path], read: Callable[[int, int, int], bytes] = os.pread) -> str:
    digest = hashlib.sha256()
    digest_files(files, digest, read)
    return digest.hexdigest()


def test_many_reads_at_once_give_the_same_digest(files):
    """The first reads wait until so many are under way together as storage with latency needs."""
    wanted = 16
    together = threading.Barrier(wanted)
    count = itertools.count()

    def read(fd: int, length: int, offset: int) -> bytes:
        if offset <= 8:  # a header, or the first sample of what has none
            return os.pread(fd, length, offset)
        if next(count) < wanted:
            together.wait(WAIT_S)  # broken, and an error here, if one is read after the other
        return os.pread(fd, max(1, length // 2), offset)  # short reads, as a signal makes them

    assert read_digest(files, read) == one_after_the_other(files)


def test_a_file_of_90_000_tensors(tmp_path):
    file = make_safetensors(tmp_path / "large.safetensors", 90_000)
    assert read_digest([file]) == one_after_the_other([file])


def test_a_damaged_file_among_many_is_named(files):
    files[1].write_bytes(files[1].read_bytes()[:20])
    with pytest.raises(ConfigError, match=r"sound weight files, and .*1\.safetensors"):
        read_digest(files)


def test_a_long_read_is_no_silence(files, caplog):
    with caplog.at_level(logging.INFO, "kvdisk.connector"):
        digest_files(files, hashlib.sha256())
        assert not caplog.messages
        digest_files(files, hashlib.sha256(), clock=itertools.count(step=2).__next__)
    first, last = caplog.messages
    assert "kvdisk reads 4 KiB of each tensor" in first and "of 4 files so far" in first
    assert "kvdisk knows the weights after" in last


# -- what is remembered ----------------------------------------------------------------------------


class Reads:
    """Counts reads. ``known``: the digest, which may be remembered however quickly it was read."""

    def __init__(self, files: list[Path], memory: Path) -> None:
        self._files, self._memory = files, memory
        self.count = 0

    def read(self, fd: int, length: int, offset: int) -> bytes:
        self.count += 1
        return os.pread(fd, length, offset)

    def known(self, worth_s: float = 0.0) -> tuple[str, bool]:
        """Return the digest, and whether files were read for it."""
        before = self.count
        return known_digest(self._files, self._memory, self.read, worth_s), self.count > before


@pytest.fixture
def reads(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files that seem to have changed long ago."""
    monkeypatch.setattr(weights.time, "time_ns", lambda: 1 << 62)
    return Reads(files, tmp_path / "memory")


def test_a_digest_is_remembered_until_a_file_changes(reads, files, tmp_path):
    right = one_after_the_other(files)
    assert reads.known() == (right, True)
    assert reads.known() == (right, False)
    (remembered,) = (tmp_path / "memory").iterdir()
    assert remembered.stat().st_mode & 0o777 == 0o600
    status = files[0].stat()
    changed = bytearray(files[0].read_bytes())
    changed[-1] ^= 1
    files[0].write_bytes(changed)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size and time as before
    again, was_read = reads.known()
    assert was_read and again == one_after_the_other(files)
    assert reads.known() == (again, False) and len(list((tmp_path / "memory").iterdir())) == 1


def test_files_that_change_while_they_are_read_are_not_remembered(reads, files, tmp_path, monkeypatch):
    real = weights.digest_files
    monkeypatch.setattr(weights, "digest_files", lambda *all_of_it: (real(*all_of_it), files[0].touch()))
    reads.known()
    assert not (tmp_path / "memory").exists()


def test_files_that_have_just_changed_and_quick_reads_are_not_remembered(reads, files, tmp_path, monkeypatch):
    reads.known(worth_s=WAIT_S)
    monkeypatch.setattr(weights.time, "time_ns", lambda: files[0].stat().st_ctime_ns + 10**9)
    reads.known()
    assert not (tmp_path / "memory").exists()


def _cut(place: Path) -> None:
    place.write_text(place.read_text()[:100])


def _forge(place: Path) -> None:
    key, found, check = place.read_text().split()
    place.write_text(f"{key} {'0' * len(found)} {check}\n")


def _link(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


def _give_away(place: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(place, 12345, 12345)


@pytest.mark.parametrize(
    "spoil",
    [_cut, _forge, _link, _give_away, lambda place: place.chmod(0o666), lambda place: place.write_bytes(b"\xff")],
)
def test_what_was_remembered_is_not_trusted_when_it_is_torn_or_anothers(reads, files, tmp_path, spoil):
    right, _ = reads.known()
    (place,) = (tmp_path / "memory").iterdir()
    spoil(place)
    assert reads.known() == (right, True)


def test_where_nothing_can_be_remembered_files_are_read(reads, files, tmp_path):
    (tmp_path / "memory").write_text("no directory")
    assert reads.known() == reads.known() == (one_after_the_other(files), True)
