# SPDX-License-Identifier: Apache-2.0
"""REQUEST and ANSWER: the files by which a command asks something of a running engine, and the
engine answers.

Both are JSON in the engine store, replaced in one step and never synced. The engine removes REQUEST
once it has answered it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import is_home_id
from kvdisk.errors import CorruptRecord

REQUEST_FILE, ANSWER_FILE = "REQUEST", "ANSWER"
JSON_VERSION = 1
_NUMBER_LIMIT = 1 << 63
MOST_RANGES = 4096
"""Ranges in one request at most, so that an engine reads it in no time."""

Ranges = Sequence[tuple[int, int]]
"""Ranges of slots: the first slot, and how many."""


class Request(NamedTuple):
    """Asks an engine to drop blocks, and with them the segments that are empty then.

    ``everything``: drop all blocks, those in memory too. Otherwise drop all blocks of ``segments``,
    and those of ``slots`` by segment, but none with a generation above ``generation``: it was
    stored since.
    """

    id: str
    everything: bool = False
    generation: int = 0
    segments: tuple[int, ...] = ()
    slots: Mapping[int, Ranges] = {}  # never written to


class Answer(NamedTuple):
    """What an engine has done. ``bytes``: of the segments that go, over all ranks. ``waits``: their
    files go with the engine's next step, and it has taken none yet. ``why``: why it has not done
    all; None where it has."""

    id: str
    blocks: int
    segments: int
    bytes: int
    waits: bool
    why: str | None = None


def write_request(home_path: Path, request: Request) -> None:
    """Replace REQUEST. Raises OSError."""
    fields = request._asdict() | {"slots": {str(number): ranges for number, ranges in request.slots.items()}}
    paths.replace_file(home_path / REQUEST_FILE, [paths.encode_json({"json_version": JSON_VERSION} | fields)])


def read_request(home_path: Path) -> Request | None:
    """Return what REQUEST says; None where there is none. Raises CorruptRecord, OSError."""
    fields = _read(home_path / REQUEST_FILE)
    if fields is None:
        return None
    try:
        slots = {
            _number(int(segment)): [(_number(first), _number(count)) for first, count in ranges]
            for segment, ranges in fields["slots"].items()
        }
        segments = tuple(_number(segment) for segment in fields["segments"])
        return Request(_id(fields["id"]), fields["everything"] is True, _number(fields["generation"]), segments, slots)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"{home_path / REQUEST_FILE} does not have the fields of a request") from error


def remove_request(home_path: Path) -> None:
    """Remove REQUEST; it is no error if it is gone already. Raises OSError."""
    with suppress(FileNotFoundError):
        (home_path / REQUEST_FILE).unlink()


def write_answer(home_path: Path, answer: Answer) -> None:
    """Replace ANSWER. Raises OSError."""
    paths.replace_file(home_path / ANSWER_FILE, [paths.encode_json({"json_version": JSON_VERSION} | answer._asdict())])


def read_answer(home_path: Path) -> Answer | None:
    """Return what ANSWER says; None where there is none. Raises CorruptRecord, OSError."""
    fields = _read(home_path / ANSWER_FILE)
    if fields is None:
        return None
    try:
        why = fields["why"]
        blocks, segments, size = (_number(fields[name]) for name in ("blocks", "segments", "bytes"))
        said = None if why is None else str(why)
        return Answer(_id(fields["id"]), blocks, segments, size, fields["waits"] is True, said)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"{home_path / ANSWER_FILE} does not have the fields of an answer") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields = paths.read_control(path)
    except FileNotFoundError:
        return None
    if fields.get("json_version") != JSON_VERSION:
        raise CorruptRecord(f"{path} is of another format")
    return fields


def _id(value: Any) -> str:
    if not (isinstance(value, str) and is_home_id(value)):
        raise ValueError
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_LIMIT:
        raise ValueError
    return value
