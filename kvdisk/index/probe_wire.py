# SPDX-License-Identifier: Apache-2.0
"""What a reader and its child process say to each other: frames of bytes, and the only code that knows them.

A frame is its length (u32) and that many bytes; all numbers are little-endian. A question: epoch u64, path
length u16, path, then each key with its length (u8) before it. An answer: status u8; with FAILED, a text; with
FOUND, the number of segments u32, the segments, and the copies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord
from kvdisk.index.base import SegmentRecord

FRAME = struct.Struct("<I")
LONGEST_FRAME_BYTES = 64 << 20
FOUND, FAILED = 0, 1

_QUESTION = struct.Struct("<QH")
_ANSWER = struct.Struct("<BI")
_SEGMENT = struct.Struct("<IQIH")
_COPY = struct.Struct("<IIIQ")


class Question(NamedTuple):
    """Which of ``keys`` the index in directory ``path`` holds in ``epoch``."""

    path: str
    epoch: int
    keys: tuple[BlockKey, ...]


class FoundCopy(NamedTuple):
    """The key at ``position`` of the question is in this slot."""

    position: int
    segment: int
    slot_index: int
    generation: int


def encode_question(question: Question) -> bytes:
    """Return the bytes of a question, without their frame."""
    path = question.path.encode()
    parts = [_QUESTION.pack(question.epoch, len(path)), path]
    for key in question.keys:
        parts += (len(key).to_bytes(1, "little"), key)
    return b"".join(parts)


def decode_question(body: bytes) -> Question:
    """Return a question. Raises CorruptRecord."""
    try:
        epoch, length = _QUESTION.unpack_from(body)
        at = _QUESTION.size + length
        path = body[_QUESTION.size : at].decode()
        keys = []
        while at < len(body):
            end = at + 1 + body[at]
            if end > len(body):
                raise CorruptRecord("question: it ends within a key")
            keys.append(BlockKey(body[at + 1 : end]))
            at = end
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptRecord(f"question: {error}") from error
    return Question(path, epoch, tuple(keys))


def encode_answer(segments: Sequence[SegmentRecord], copies: Sequence[FoundCopy]) -> bytes:
    """Return the bytes of an answer that found these copies, in these segments."""
    parts = [_ANSWER.pack(FOUND, len(segments))]
    parts += (_SEGMENT.pack(*segment) for segment in segments)
    parts += (_COPY.pack(*copy) for copy in copies)
    return b"".join(parts)


def encode_failure(text: str) -> bytes:
    """Return the bytes of the answer that the index cannot be read."""
    return _ANSWER.pack(FAILED, 0) + text.encode()


def decode_answer(body: bytes) -> tuple[dict[int, SegmentRecord], list[FoundCopy]]:
    """Return the segments by number, and the copies. Raises CorruptRecord, also for the answer of a failure."""
    try:
        status, count = _ANSWER.unpack_from(body)
        if status != FOUND:
            raise CorruptRecord(body[_ANSWER.size :].decode(errors="replace"))
        end = _ANSWER.size + count * _SEGMENT.size
        segments = {fields[0]: SegmentRecord(*fields) for fields in _SEGMENT.iter_unpack(body[_ANSWER.size : end])}
        return segments, [FoundCopy(*fields) for fields in _COPY.iter_unpack(body[end:])]
    except struct.error as error:
        raise CorruptRecord(f"answer: {error}") from error
