# SPDX-License-Identifier: Apache-2.0
"""Coded objects: what was coded comes back, and what others have made of it takes neither memory
nor time, and never raises."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.remote.client import open_remote
from kvdisk.remote.planes import HEAD, PIECE_ELEMENTS, PlanesCodec

CODEC = PlanesCodec()
HEAD_BYTES = HEAD.size + 2 * 4
"""Of an object of one piece in two planes."""
GIB = 1 << 30
"""Of zeros, which are coded to next to nothing."""


def vector(body: bytes) -> np.ndarray:
    return np.frombuffer(body, np.uint8)


def like_kv(count: int, dtype: str = "<f2", seed: int = 0) -> bytes:
    """Return numbers that are near 0, as those of KV are."""
    return np.random.default_rng(seed).normal(0, 1, count).astype(dtype).tobytes()


BODY = like_kv(4096)
CODED = CODEC.encode(vector(BODY), 2)


def decoded(coded: bytes, byte_count: int = len(BODY)) -> bytes | None:
    found = CODEC.decode(memoryview(coded), byte_count)
    return None if found is None else found.tobytes()


def head(planes: int, raw_bytes: int, *lengths: int, magic: bytes = b"KVDPLAN1") -> bytes:
    return struct.pack(f"<8sQQ{len(lengths)}I", magic, planes, raw_bytes, *lengths)


def alone(frame: bytes, raw_bytes: int) -> bytes:
    """Return an object of one frame."""
    return head(1, raw_bytes, len(frame)) + frame


@given(st.binary(min_size=1, max_size=5000) | st.sampled_from([BODY, bytes(8192)]), st.integers(0, 9))
def test_what_was_coded_comes_back(body, element_bytes):
    coded = CODEC.encode(vector(body), element_bytes)
    assert len(coded) <= CODEC.most_coded_bytes(len(body))
    assert CODEC.raw_bytes_of(memoryview(coded)) == len(body)
    assert decoded(coded, len(body)) == body


@pytest.mark.parametrize(
    "size", [1, 4096, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 8 * PIECE_ELEMENTS + 4096]
)
def test_what_does_not_shrink_hardly_grows(size):
    body = np.random.default_rng(size).bytes(size)
    for element_bytes in (1, 2, 4):
        coded = CODEC.encode(vector(body), element_bytes)
        assert len(coded) <= CODEC.most_coded_bytes(size) and decoded(coded, size) == body


def test_planes_shrink_numbers_that_bytes_in_a_row_do_not():
    body = like_kv(1 << 18)
    in_planes, in_a_row = (len(CODEC.encode(vector(body), size)) for size in (2, 1))
    assert in_planes < 0.9 * len(body) and in_planes < 0.95 * in_a_row


def test_each_size_of_element_has_its_planes():
    for dtype, size in (("<f2", 2), ("<f4", 4), ("u1", 1)):
        coded = CODEC.encode(vector(like_kv(1000, dtype)), size)
        assert coded[8] == size and decoded(coded, 1000 * size) == like_kv(1000, dtype)
    assert CODEC.encode(vector(like_kv(1000)), 3)[8] == 1
    assert CODEC.encode(vector(bytes(1001)), 2)[8] == 1


# -- what is foreign ---------------------------------------------------------------------------


@given(st.data())
def test_whatever_was_changed_is_refused_or_has_the_right_length(data):
    body = bytearray(CODED)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "copy"]))
        at = data.draw(st.integers(0, max(0, len(body) - 1)) | st.integers(0, min(len(body), HEAD_BYTES + 32)))
        if kind == "flip" and at < len(body):
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del body[at : at + data.draw(st.integers(1, 64))]
        elif kind == "insert":
            body[at:at] = data.draw(st.binary(max_size=16))
        else:
            body[at : at + 8] = body[HEAD_BYTES : HEAD_BYTES + 8]
    found = decoded(bytes(body))
    assert found is None or len(found) == len(BODY)


@given(st.binary(max_size=300), st.sampled_from([b"", CODED[:8], CODED[:HEAD_BYTES]]), st.integers(0, 1 << 63))
def test_whatever_it_is_it_is_refused(body, start, byte_count):
    assert decoded(start + body, byte_count) is None


def test_all_that_is_cut_is_refused():
    for length in [*range(HEAD_BYTES + 64), *range(HEAD_BYTES, len(CODED), 97), len(CODED) - 1]:
        assert decoded(CODED[:length]) is None
    assert decoded(CODED + b"x") is None


def test_each_bit_of_the_head_counts():
    for bit in range(8 * HEAD_BYTES):
        body = bytearray(CODED)
        body[bit // 8] ^= 1 << bit % 8
        assert decoded(bytes(body)) is None, bit


def test_another_length_than_was_asked_for_is_refused():
    for byte_count in (0, 1, len(BODY) - 1, len(BODY) + 1, 2 * len(BODY), len(BODY) // 2, -len(BODY)):
        assert decoded(CODED, byte_count) is None


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor().compress(bytes(8191)),
        zstandard.ZstdCompressor().compress(bytes(8193)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8192)),
        zstandard.ZstdCompressor().compress(bytes(8192)) * 2,
        zstandard.ZstdCompressor().compress(bytes(8192)) + b"x",
        b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstandard.ZstdCompressor().compress(bytes(8192)),
        b"",
    ],
    ids=["short", "long", "of no size", "twice", "more behind", "skippable", "none"],
)
def test_a_frame_of_another_length_is_refused(frame):
    assert decoded(alone(frame, 8192), 8192) is None


def test_a_frame_that_another_zstd_made_is_decoded():
    for level in (1, 3, 19):
        frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(bytes(8192))
        assert decoded(alone(frame, 8192), 8192) == bytes(8192)


def test_a_wrong_checksum_of_zstds_own_is_refused():
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(BODY))
    frame[-1] ^= 1
    assert decoded(alone(bytes(frame), len(BODY))) is None


def test_what_would_be_much_takes_no_memory():
    """In a process that has no more than a little above what it needs."""
    program = f"""
import resource, struct, sys
import numpy as np, zstandard
from kvdisk.remote.planes import PlanesCodec
codec = PlanesCodec()
small = zstandard.ZstdCompressor().compress(bytes(8192))
compressor = zstandard.ZstdCompressor(level=1).compressobj(size={GIB})
bomb = b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(1 << 10)), compressor.flush()])
# 8192 zeros behind a window of 128 MiB.
wide = bytes.fromhex("28b52ffd8088") + struct.pack("<I", 8192) + ((8192 << 3) | 3).to_bytes(3, "little") + bytes(1)
assert zstandard.ZstdDecompressor().decompress(wide) == bytes(8192)
codec.decode(memoryview(b"x"), 8192)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20),) * 2)
def alone(frame, says):
    return memoryview(struct.pack("<8sQQI", b"KVDPLAN1", 1, says, len(frame)) + frame)
for frame in (bomb, wide, b"\\x28\\xb5\\x2f\\xfd\\xe0" + struct.pack("<Q", {GIB}) + b"\\0" * 99):
    for says in (8192, {GIB}):
        assert codec.decode(alone(frame, says), 8192) is None
assert codec.decode(alone(small, 8192), 8192).tobytes() == bytes(8192)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# -- the package -------------------------------------------------------------------------------


def test_without_its_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    config = Config.from_mapping({"remote": "s3://bucket/kv", "remote_codec": "zstd-planes"})
    with pytest.raises(ConfigError, match=r"^remote_codec 'zstd-planes' needs zstandard \(pip install zstandard\)\.$"):
        open_remote(config)
    open_remote(Config.from_mapping({"remote": "s3://bucket/kv"})).close()


def test_nothing_imports_it_unless_it_is_asked_for():
    program = (
        "import sys\n"
        "from kvdisk.config import Config\n"
        "from kvdisk.remote.client import open_remote\n"
        "import kvdisk.store, kvdisk.assembly, kvdisk.cli.remote, kvdisk.cli.check\n"
        "open_remote(Config.from_mapping({'remote': 's3://bucket/kv'})).close()\n"
        "assert 'zstandard' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
