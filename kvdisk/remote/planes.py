# SPDX-License-Identifier: Apache-2.0
"""Lossless coding of objects, ``remote_codec``: the bytes of an element in planes, each a frame of
zstd.

The first byte of each element is one plane, the second byte the next, and so on. Neighbours'
exponents are alike, and their mantissas are not: apart from each other the former shrink.

A coded object is a head of ``HEAD_BYTES`` and the frames, one behind the other, up to its end.
What is decoded is foreign: its sizes are compared with what is wanted before memory is taken for
them. Whether the bytes are right is not judged here: a block has its own checksum.
"""

from __future__ import annotations

import struct
import threading
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdisk.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
"""A vector of bytes."""

SUFFIX = ".zstd-planes1"
"""What the name of a coded object ends with, behind the name that it would have as it is: who does
not know the codec never asks for it."""
MOST_PLANES = 4
HEAD_BYTES = 56
_HEAD = struct.Struct(f"<8sQQ{MOST_PLANES}Q")
_MAGIC = b"KVDPLAN1"
_PLANES = (1, 2, 4)
_PARAMETERS = {"window_log": 17, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7, "strategy": 1}
"""Of zstd: what KV has of repeated bytes is by chance, and to write such down takes more than it
saves, in bytes and in time. What shrinks is what zstd leaves to its entropy coder."""
_LEAST_WINDOW = 1024
"""zstd has no window that is smaller."""


def most_coded_bytes(byte_count: int) -> int:
    """Return the length of the longest object that so many bytes are coded to."""
    return HEAD_BYTES + byte_count + byte_count // 128 + MOST_PLANES * 1024


def raw_bytes_of(coded: memoryview) -> int | None:
    """Return how many bytes a coded object says that it is decoded to; None where it is none."""
    if len(coded) < HEAD_BYTES or coded[: len(_MAGIC)] != _MAGIC:
        return None
    return int(_HEAD.unpack_from(coded)[2])


class PlanesCodec:
    """Codes and decodes. Any thread may call. Raises ConfigError where its package is missing."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError("remote_codec 'zstd-planes' needs zstandard (pip install zstandard).") from error
        self._zstd = zstandard
        self._of_thread = threading.local()
        """Each thread's compressor and decompressor: they are for one thread at a time."""

    def encode(self, raw: Bytes, element_bytes: int = 1) -> bytes:
        """Return a vector coded. ``element_bytes``: of an element, 1, 2 or 4; another, or one that
        does not divide the vector, is as 1. It is better for the length alone."""
        planes = element_bytes if element_bytes in _PLANES and raw.size % element_bytes == 0 else 1
        compress = self._own("compressor", self._make_compressor).compress
        words = raw.view(f"<u{planes}")
        frames = [compress((words >> 8 * at).astype(np.uint8)) for at in range(planes)]
        lengths = [*map(len, frames), *[0] * (MOST_PLANES - planes)]
        return b"".join((_HEAD.pack(_MAGIC, planes, raw.size, *lengths), *frames))

    def decode(self, coded: memoryview, byte_count: int) -> Bytes | None:
        """Return the ``byte_count`` bytes that were coded; None where it is not so many, or not
        coded like this."""
        frames = self._frames(coded, byte_count)
        if frames is None:
            return None
        decompressor = self._own("decompressor", self._zstd.ZstdDecompressor)
        words = np.zeros(byte_count // len(frames), f"<u{len(frames)}")
        for at, frame in enumerate(frames):
            try:
                plane = decompressor.decompress(frame, max_output_size=words.size, allow_extra_data=False)
            except self._zstd.ZstdError:
                return None
            if len(plane) != words.size:
                return None
            words |= np.frombuffer(plane, np.uint8).astype(words.dtype) << 8 * at
        return words.view(np.uint8)

    def _frames(self, coded: memoryview, byte_count: int) -> list[memoryview] | None:
        """Return the frames of a coded object, each of which says that it has its part of
        ``byte_count`` bytes, and needs no more memory than about that; None where it is not so."""
        if raw_bytes_of(coded) != byte_count or not byte_count:
            return None
        _, planes, _, *lengths = _HEAD.unpack_from(coded)
        if planes not in _PLANES or byte_count % planes or any(lengths[planes:]):
            return None
        ends = list(accumulate(lengths[:planes], initial=HEAD_BYTES))
        if ends[-1] != len(coded):
            return None
        frames = [coded[start:end] for start, end in pairwise(ends)]
        plane_bytes = byte_count // planes
        return frames if all(self._says(frame, plane_bytes) for frame in frames) else None

    def _says(self, frame: memoryview, byte_count: int) -> bool:
        try:
            says = self._zstd.get_frame_parameters(frame)
        except self._zstd.ZstdError:
            return False
        return (
            says.content_size == byte_count
            and says.window_size <= max(_LEAST_WINDOW, 2 * byte_count)
            and not says.dict_id
        )

    def _make_compressor(self) -> Any:
        parameters = self._zstd.ZstdCompressionParameters(**_PARAMETERS)
        return self._zstd.ZstdCompressor(compression_params=parameters)

    def _own(self, name: str, make: Any) -> Any:
        if not hasattr(self._of_thread, name):
            setattr(self._of_thread, name, make())
        return getattr(self._of_thread, name)
