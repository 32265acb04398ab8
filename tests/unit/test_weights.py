# SPDX-License-Identifier: Apache-2.0
"""The digest of weight files is of every byte, however many are read at once, and is remembered
only as long as the file system shows that no file changes."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from support.waits import WAIT_S, until

from kvdisk.connector import weights
from kvdisk.connector.weights import WeightsChanged, content_digest, facts, known_digest, read_early, sample_digest
from kvdisk.device.mounts import Mount
from kvdisk.errors import ConfigError

CHOSEN = random.Random(5)


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


def flip(file: Path, at: int) -> None:
    """Change a byte, and leave size and time of the file as they were."""
    status, content = file.stat(), bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of several pieces, of a piece, and of less."""
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1 << 16)
    (tmp_path / "model").mkdir()
    many = [make_safetensors(tmp_path / "model" / f"{at}.safetensors", count) for at, count in enumerate((900, 1, 37))]
    other = tmp_path / "model" / "pytorch_model.bin"
    other.write_bytes(CHOSEN.randbytes(3 << 16))
    return [*many, other]


# -- what is read ----------------------------------------------------------------------------------


def test_any_byte_of_any_file_counts(files):
    """The first, the last, and some of each piece; names, sizes and order, too."""
    before = content_digest(files)
    found = {before}
    flips = 0
    for file in files:
        size = file.stat().st_size
        for at in sorted({0, size - 1, size // 2, *CHOSEN.sample(range(size), 4)}):
            flip(file, at)
            found.add(content_digest(files))
            flip(file, at)
            flips += 1
    assert content_digest(files) == before and len(found) == 1 + flips
    other = files[0].rename(files[0].with_name("renamed.safetensors"))
    assert content_digest([other, *files[1:]]) not in found
    assert content_digest([*files[1:], other]) != content_digest([other, *files[1:]])


def test_many_reads_at_once_give_the_same_digest(files, monkeypatch):
    """The first reads wait until so many are under way together as storage with latency needs."""
    monkeypatch.setattr(weights, "_PIECE_BYTES", 4096)
    wanted = weights._THREADS
    right = content_digest(files)
    together, count = threading.Barrier(wanted), itertools.count()

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(count) < wanted:
            together.wait(WAIT_S)  # broken, and an error here, if one is read after the other
        (buffer,) = buffers
        return os.preadv(fd, [buffer[: max(1, len(buffer) // 2)]], offset)  # short, as a signal makes them

    assert content_digest(files, read) == right


def test_a_read_that_fails_is_raised_and_others_end(files):
    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        content_digest(files, read)


def test_a_long_read_is_no_silence(files, caplog, monkeypatch):
    monkeypatch.setattr(weights, "_LOOK_S", 0.01)

    def slowly(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        until(lambda: "kvdisk reads the weights" in caplog.text)
        return os.preadv(fd, buffers, offset)

    clock = itertools.count(step=5).__next__
    with caplog.at_level(logging.INFO, "kvdisk.connector"):
        content_digest(files, slowly, clock)
    (said,) = caplog.messages
    assert said.startswith("kvdisk reads the weights to identify them: ") and said.endswith(" GB so far.")


def test_a_sample_tells_other_weights_and_damage(files):
    """It may miss a byte, and never tells apart what is equal."""
    before = sample_digest(files)
    assert sample_digest(files) == before
    flip(files[3], 0)
    assert sample_digest(files) != before
    files[1].write_bytes(files[1].read_bytes()[:20])
    with pytest.raises(ConfigError, match=r"sound weight files, and .*1\.safetensors"):
        sample_digest(files)


# -- what is remembered ----------------------------------------------------------------------------


class Reads:
    """Counts reads. ``known``: the digest, which may be remembered however quickly it was read."""

    def __init__(self, files: list[Path], memory: Path) -> None:
        self.files, self._memory = files, memory
        self.count = 0

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.count += 1
        return os.preadv(fd, buffers, offset)

    def known(self, worth_s: float = 0.0) -> tuple[str, bool]:
        """Return the digest, and whether files were read for it."""
        before = self.count
        return known_digest(self.files, self._memory, read=self.read, worth_s=worth_s), self.count > before


@pytest.fixture
def reads(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files that seem to have changed long ago, on a file system whose change times tell."""
    monkeypatch.setattr(weights.time, "time_ns", lambda: 1 << 62)
    monkeypatch.setattr(weights, "kind_of", lambda _: Mount("/", "ext4"))
    return Reads(files, tmp_path / "memory")


def remembered(tmp_path: Path) -> list[Path]:
    memory = tmp_path / "memory"
    return [each for each in memory.iterdir() if each.suffix != ".lock"] if memory.is_dir() else []


def test_a_digest_is_remembered_until_a_file_changes(reads, files, tmp_path):
    right = content_digest(files)
    assert reads.known() == (right, True)
    assert reads.known() == (right, False)
    (place,) = remembered(tmp_path)
    assert place.stat().st_mode & 0o777 == 0o600
    flip(files[0], -1)
    again, was_read = reads.known()
    assert was_read and again == content_digest(files) != right
    assert reads.known() == (again, False) and len(remembered(tmp_path)) == 1


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_files_that_change_once_they_are_loaded_have_no_digest(reads, files, tmp_path, when):
    """What the model has of them is not known."""
    seen = facts(files)
    if when == "before":
        files[0].touch()

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        files[0].touch()
        return os.preadv(fd, buffers, offset)

    with pytest.raises(WeightsChanged, match="chang"):
        known_digest(files, tmp_path / "memory", seen=seen, read=read, worth_s=0.0)
    assert not remembered(tmp_path)


def test_files_that_have_just_changed_and_quick_reads_are_not_remembered(reads, files, tmp_path, monkeypatch):
    reads.known(worth_s=WAIT_S)
    monkeypatch.setattr(weights.time, "time_ns", lambda: files[0].stat().st_ctime_ns + 10**9)
    reads.known()
    assert not remembered(tmp_path)


@pytest.mark.parametrize("kind", ["fuse", "fuse.s3fs", "squashfs", "erofs", "iso9660", "overlay", "9p", "virtiofs", ""])
def test_where_change_times_say_nothing_nothing_is_remembered(reads, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(weights, "kind_of", lambda _: Mount("/", kind) if kind else None)
    assert [reads.known()[1] for _ in range(2)] == [True, True]
    assert not remembered(tmp_path)


IMAGES = {
    "squashfs": ["mksquashfs", "{source}", "{image}", "-all-time", "1700000000", "-mkfs-time", "1700000000", "-quiet"],
    "ext4": f"mkfs.ext4 -q -U {UUID(int=7)} -d {{source}} {{image}} 32M".split(" "),
}
"""What makes an image of a directory in which all that does not depend on content is equal."""


@pytest.mark.parametrize("kind", IMAGES)
def test_two_images_at_one_place_are_not_taken_for_each_other(tmp_path, monkeypatch, kind):
    """Path, device, inode, size and all times of their files are equal, and so are the ids of their
    file systems."""
    make = [shutil.which(IMAGES[kind][0], path=f"{os.environ['PATH']}:/sbin:/usr/sbin") or "", *IMAGES[kind][1:]]
    if os.geteuid() or not make[0]:
        pytest.skip("needs root, and a program that makes images")
    monkeypatch.undo()  # of the mounts, which unit tests do not see
    monkeypatch.setattr(weights.time, "time_ns", lambda: 1 << 62)
    monkeypatch.setenv("E2FSPROGS_FAKE_TIME", "1700000000")
    place, found = tmp_path / "mounted", []
    place.mkdir()
    for letter in "ab":
        source = tmp_path / letter
        source.mkdir()
        weights_file = source / "model.bin"
        weights_file.write_bytes(letter.encode() * (4 << 20))
        for each in (weights_file, source):
            os.utime(each, (1.7e9, 1.7e9))
        names = {"source": str(source), "image": str(tmp_path / f"{letter}.img")}
        subprocess.run([part.format(**names) for part in make], check=True, capture_output=True)
        mounted = ["/bin/mount", "-o", "loop,ro", names["image"], str(place)]
        if subprocess.run(mounted, check=False, capture_output=True).returncode:
            pytest.skip(f"this system mounts no image of {kind}")
        try:
            seen = facts([place / "model.bin"])
            found.append((seen, known_digest([place / "model.bin"], tmp_path / "memory", worth_s=0.0)))
        finally:
            subprocess.run(["/bin/umount", place], check=True)
    (seen, one), (also_seen, other) = found
    assert one != other
    assert [each._replace(device=0, inode_changed_ns=0) for each in seen] == [
        each._replace(device=0, inode_changed_ns=0) for each in also_seen
    ], "they could not be told apart by these"


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
def test_what_was_remembered_is_not_trusted_when_it_is_torn_or_anothers(reads, tmp_path, spoil):
    right, _ = reads.known()
    (place,) = remembered(tmp_path)
    spoil(place)
    assert reads.known() == (right, True)


def test_where_nothing_can_be_remembered_files_are_read(reads, files, tmp_path):
    (tmp_path / "memory").write_text("no directory")
    assert reads.known() == reads.known() == (content_digest(files), True)


def _known_in_another_process(reads: Reads, told: object) -> None:
    told.send(reads.known())  # type: ignore[attr-defined]


def test_processes_that_start_together_read_once(reads):
    """The second waits for the first, and has the answer from it; both on a thread or in a process
    of its own."""
    may_go_on, is_reading = threading.Event(), threading.Event()
    real = reads.read

    def slowly(*arguments: object) -> int:
        is_reading.set()
        assert may_go_on.wait(WAIT_S)
        return real(*arguments)  # type: ignore[arg-type]

    first = Reads(reads.files, reads._memory)
    first.read = slowly  # type: ignore[method-assign]
    answers: list[tuple[str, bool]] = []
    threads = [threading.Thread(target=lambda: answers.append(first.known()))]
    threads[0].start()
    assert is_reading.wait(WAIT_S)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_known_in_another_process, args=(reads, theirs))
    child.start()
    threads.append(threading.Thread(target=lambda: answers.append(reads.known())))
    threads[1].start()
    assert not ours.poll(0.3) and not answers
    may_go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert ours.poll(WAIT_S)
    told = ours.recv()
    child.join(WAIT_S)
    assert sorted(was_read for _, was_read in (*answers, told)) == [False, False, True]
    assert len({digest for digest, _ in (*answers, told)}) == 1


def test_large_weights_are_read_while_they_are_loaded(reads, files, tmp_path, monkeypatch):
    """What an engine asks for later is remembered by then, or awaited."""
    read_early(files, tmp_path / "memory")
    assert not (tmp_path / "memory").exists(), "few bytes are read in no time"
    monkeypatch.setattr(weights, "_EARLY_BYTES", 1)
    monkeypatch.setattr(weights, "_WORTH_S", 0.0)
    real, done = known_digest, threading.Event()

    def known(*arguments: object) -> str:
        try:
            return real(*arguments, worth_s=0.0)  # type: ignore[arg-type]
        finally:
            done.set()

    monkeypatch.setattr(weights, "known_digest", known)
    read_early(files, tmp_path / "memory")
    assert done.wait(WAIT_S)
    assert reads.known() == (content_digest(files), False)
