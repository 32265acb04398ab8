# SPDX-License-Identifier: Apache-2.0
"""Lossless coding of objects, ``remote_codec``: the bytes of an element in planes, each coded with
zstd.

The first byte of each element is in one plane, the second byte in the next, and so on. Neighbours'
exponents are alike, and their mantissas are not: apart from each other the former shrink. Elements
are taken in pieces of PIECE_ELEMENTS, whose planes stay in a processor's cache.

A coded object is a head: magic, planes, bytes before coding; then the length of each frame; then
the frames up to the end, one for each plane of the first piece, of the next, and so on. All numbers
are little-endian. What is decoded is foreign: its sizes are compared with what is wanted before
memory is taken for them. Whether the bytes are right is not judged here: a block has its own
checksum.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdisk.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
"""A vector of bytes."""

SUFFIX = ".zstd-planes1"
PIECE_ELEMENTS = 1 << 17
"""As many as zstd has bytes in a block, so that larger pieces would shrink no further."""
HEAD = struct.Struct("<8sQQ")
_MAGIC = b"KVDPLAN1"
_PLANES = (1, 2, 4)
_LENGTH = np.dtype("<u4")
"""Of the length of a frame."""
_PARAMETERS = {"window_log": 17, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7, "strategy": 1}
"""Of zstd: what KV has of repeated bytes is by chance, and to write such down takes more than it
saves, in bytes and in time. What shrinks is what zstd leaves to its entropy coder."""
_LEAST_WINDOW = 1024
"""zstd has no window that is smaller."""


class PlanesCodec:
    """See ``Codec`` and the module. Raises ConfigError where its package is missing."""

    suffix = SUFFIX
    package = "zstandard"

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError("remote_codec 'zstd-planes' needs zstandard (pip install zstandard).") from error
        self._zstd = zstandard
        self._of_thread = threading.local()
        """Each thread's compressor and decompressor: they are for one thread at a time."""

    @staticmethod
    def most_coded_bytes(byte_count: int) -> int:
        return byte_count + byte_count // 64 + 1024

    @staticmethod
    def raw_bytes_of(coded: memoryview) -> int | None:
        if len(coded) < HEAD.size or coded[: len(_MAGIC)] != _MAGIC:
            return None
        return int(HEAD.unpack_from(coded)[2])

    def encode(self, raw: Bytes, element_bytes: int = 1) -> bytes:
        """See ``Codec.encode``. Elements have 1, 2 or 4 bytes; another size, or one that does not
        divide the vector, is as 1."""
        planes = element_bytes if element_bytes in _PLANES and raw.size % element_bytes == 0 else 1
        compress = self._own("compressor", self._make_compressor).compress
        frames = [
            compress((piece >> 8 * at).astype(np.uint8))
            for piece in _pieces(raw.view(f"<u{planes}"))
            for at in range(planes)
        ]
        lengths = np.array(list(map(len, frames)), _LENGTH)
        return b"".join((HEAD.pack(_MAGIC, planes, raw.size), lengths.tobytes(), *frames))

    def decode(self, coded: memoryview, byte_count: int) -> Bytes | None:
        frames = self._frames(coded, byte_count)
        if frames is None:
            return None
        decompress = self._own("decompressor", self._zstd.ZstdDecompressor).decompress
        planes = int(HEAD.unpack_from(coded)[1])
        raw = np.empty(byte_count, np.uint8)
        for number, piece in enumerate(_pieces(raw.view(f"<u{planes}"))):
            for at, frame in enumerate(frames[number * planes : (number + 1) * planes]):
                try:
                    plane = decompress(frame, max_output_size=piece.size, allow_extra_data=False)
                except self._zstd.ZstdError:
                    return None
                if len(plane) != piece.size:
                    return None
                widened = np.frombuffer(plane, np.uint8).astype(piece.dtype)
                piece[:] = piece | (widened << 8 * at) if at else widened
        return raw

    def _frames(self, coded: memoryview, byte_count: int) -> list[memoryview] | None:
        """Return the frames of a coded object, each of which says that it has its part of
        ``byte_count`` bytes, and needs no more memory than about that; None where it is not so."""
        if self.raw_bytes_of(coded) != byte_count or not byte_count:
            return None
        planes = int(HEAD.unpack_from(coded)[1])
        if planes not in _PLANES or byte_count % planes:
            return None
        elements = byte_count // planes
        pieces = [min(PIECE_ELEMENTS, elements - start) for start in range(0, elements, PIECE_ELEMENTS)]
        start = HEAD.size + _LENGTH.itemsize * planes * len(pieces)
        if len(coded) < start:
            return None
        lengths = np.frombuffer(coded[HEAD.size : start], _LENGTH).tolist()
        ends = list(accumulate(lengths, initial=start))
        if ends[-1] != len(coded):
            return None
        frames = [coded[start:end] for start, end in pairwise(ends)]
        sound = all(self._says(frame, pieces[at // planes]) for at, frame in enumerate(frames))
        return frames if sound else None

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


def _pieces(elements: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, elements.size, PIECE_ELEMENTS):
        yield elements[start : start + PIECE_ELEMENTS]
