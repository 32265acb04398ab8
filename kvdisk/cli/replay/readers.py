# SPDX-License-Identifier: Apache-2.0
"""Reads traces, gzip or plain. A line that is damaged ends the reading with one sentence that names
it.

Mooncake, one JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length``
(tokens), ``hash_ids`` (one number for each block of the prompt; the last block may be partial).

Azure LLM inference, CSV with a header: ``TIMESTAMP`` (date and time), ``ContextTokens``,
``GeneratedTokens``; other columns are ignored. It does not say which prompts share blocks, so none
do: it tells what is written, not what hits.

Generic, one JSON object a line, with one of

    blocks      a list of numbers or words, one for each block, the last of which may be partial
    tokens      a list of token ids
    prompt      text; four bytes of UTF-8 stand for a token

and, where known, ``time_s`` (seconds), ``prompt_tokens`` (with ``blocks``; else the last block
counts as full) and ``output_tokens``. Of ``tokens`` and ``prompt`` full blocks count only, as in
vLLM. Other fields are ignored.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvdisk.cli.replay.trace import Chain, Trace, TracedRequest, TraceError

DEFAULT_BLOCK_TOKENS = {"mooncake": 512}
_OTHER_BLOCK_TOKENS = 16
_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 24
"""Of one prompt."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NO_IDENTITY = (
    "an Azure trace does not say which prompts share blocks: here no two requests share any, so nothing can hit,"
    " and only what would be written is of use."
)
BYTES_FOR_TOKENS = f"prompts are text: {_BYTES_PER_TOKEN} bytes stand for a token."


class Form(StrEnum):
    """Of a trace; AUTO: known by its first line."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    JSONL = "jsonl"


class _Damaged(Exception):
    """What is wrong with a line, to go behind ``line 7: ``."""


def read_trace(
    path: Path,
    form: Form = Form.AUTO,
    block_tokens: int | None = None,
    limit: int | None = None,
    *,
    whole: bool = False,
) -> Trace:
    """Read a trace, or its first ``limit`` requests. ``whole``: leave partial blocks out. Raises
    TraceError."""
    lines = _Lines()
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            return _read(path, lines.of(source), form, block_tokens, limit, whole)
    except _Damaged as damage:
        raise TraceError(f"{path}, line {lines.number}: {damage}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None


class _Lines:
    """The lines of a file that are not blank. ``number``: of the last one that was read, from 1."""

    number = 0

    def of(self, source: Iterable[bytes]) -> Iterator[str]:
        """Yield the lines."""
        for self.number, raw in enumerate(source, start=1):
            try:
                line = raw.decode("utf-8-sig" if self.number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise _Damaged("not text in UTF-8") from None
            if line:
                yield line


def _read(
    path: Path, lines: Iterator[str], form: Form, block_tokens: int | None, limit: int | None, whole: bool
) -> Trace:
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path} is empty")
    if form is Form.AUTO:
        form = _form_of(first)
    if block_tokens is None:
        block_tokens = DEFAULT_BLOCK_TOKENS.get(form.value, _OTHER_BLOCK_TOKENS)
    parser = _Parser(block_tokens)
    if form is Form.AZURE:
        columns = _columns(first)
        parser.notes[NO_IDENTITY] = None
        requests = (parser.azure(line, columns) for line in lines)
    else:
        parse = parser.mooncake if form is Form.MOONCAKE else parser.generic
        requests = (parse(_object(line)) for line in chain((first,), lines))
    found = list(islice(requests, limit))
    if whole:
        found = [
            request._replace(hashes=request.hashes[:full], tokens=full * block_tokens)
            for request in found
            for full in (request.tokens // block_tokens,)
        ]
    if not any(request.hashes for request in found):
        raise TraceError(f"{path} has no request with a block of {block_tokens} tokens")
    return Trace(path.name, form.value, block_tokens, found, tuple(parser.notes))


def _form_of(line: str) -> Form:
    if line.startswith("{"):
        return Form.MOONCAKE if "hash_ids" in _object(line) else Form.JSONL
    if set(_AZURE_COLUMNS) <= set(_cells(line)):
        return Form.AZURE
    raise _Damaged(f"neither a JSON object nor a header with {', '.join(_AZURE_COLUMNS)}; see --form")


def _columns(header: str) -> list[int]:
    """Return where the columns are that are read."""
    names = _cells(header)
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        raise _Damaged(f"the header has no column {missing[0]}")
    return [names.index(name) for name in _AZURE_COLUMNS]


class _Parser:
    """Makes requests of lines. ``notes``: what a reader of the figures has to know, as keys."""

    def __init__(self, block_tokens: int) -> None:
        self.notes: dict[str, None] = {}
        self._block_tokens = block_tokens
        self._chain = Chain()
        self._serial = 0

    def mooncake(self, found: Mapping[str, Any]) -> TracedRequest:
        """See the module."""
        time_ms = _number(found, "timestamp")
        tokens = _whole_number(found, "input_length")
        output_tokens = _whole_number(found, "output_length") if "output_length" in found else 0
        return self._named(time_ms / 1000, _names(found, "hash_ids"), tokens, output_tokens)

    def azure(self, line: str, columns: list[int]) -> TracedRequest:
        """See the module."""
        cells = _cells(line)
        if len(cells) <= max(columns):
            raise _Damaged(f"{len(cells)} values, where the header has more")
        time, context, generated = (cells[column] for column in columns)
        try:
            when = datetime.fromisoformat(time)
            time_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise _Damaged(f"TIMESTAMP must be a date and a time, not {_shown(time)}") from None
        count = _count_of("ContextTokens", context) // self._block_tokens
        output_tokens = _count_of("GeneratedTokens", generated)
        head = self._serial.to_bytes(8, "big")
        self._serial += 1
        return self._full(time_s, [head + at.to_bytes(8, "big") for at in range(count)], output_tokens)

    def generic(self, found: Mapping[str, Any]) -> TracedRequest:
        """See the module."""
        time_s = _number(found, "time_s") if "time_s" in found else 0.0
        output_tokens = _whole_number(found, "output_tokens") if "output_tokens" in found else 0
        given = [name for name in ("blocks", "tokens", "prompt") if name in found]
        if len(given) != 1:
            also = f", not {' and '.join(given)}" if given else ""
            raise _Damaged(f"must have one of blocks, tokens and prompt{also}")
        if given == ["blocks"]:
            names = _names(found, "blocks")
            if "prompt_tokens" not in found:
                return self._full(time_s, names, output_tokens)
            return self._named(time_s, names, _whole_number(found, "prompt_tokens"), output_tokens)
        if given == ["tokens"]:
            data, width = _token_bytes(found["tokens"]), 8
        else:
            if not isinstance(found["prompt"], str):
                raise _Damaged("prompt must be text")
            data, width = found["prompt"].encode("utf-8", "surrogatepass"), _BYTES_PER_TOKEN
            self.notes[BYTES_FOR_TOKENS] = None
        size = width * self._block_tokens
        last = len(data) // size * size
        return self._full(time_s, [data[at : at + size] for at in range(0, last, size)], output_tokens)

    def _full(self, time_s: float, contents: list[bytes], output_tokens: int) -> TracedRequest:
        """Return a request all of whose blocks are full."""
        tokens = len(contents) * self._block_tokens
        return TracedRequest(time_s, self._chain.hashes(contents), tokens, output_tokens)

    def _named(self, time_s: float, contents: list[bytes], tokens: int, output_tokens: int) -> TracedRequest:
        """Return a request whose last block may be partial."""
        count, each = len(contents), self._block_tokens
        if not (count - 1) * each < tokens <= count * each and (tokens or contents):
            raise _Damaged(f"{count} blocks of {each} tokens cannot be a prompt of {tokens}; see --block-tokens")
        return TracedRequest(time_s, self._chain.hashes(contents), tokens, output_tokens)


# -- values ------------------------------------------------------------------------------------


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise _Damaged(f"not a line of CSV ({error})") from None


def _count_of(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST_TOKENS:
        return int(text)
    raise _Damaged(f"{name} must be a whole number of tokens, not {_shown(text)}")


def _token_bytes(tokens: Any) -> bytes:
    if isinstance(tokens, list) and all(type(token) is int and 0 <= token < 1 << 64 for token in tokens):
        return b"".join(token.to_bytes(8, "big") for token in tokens)
    raise _Damaged("tokens must be a list of token ids, whole numbers that are not negative")


def _object(line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise _Damaged("not a JSON object; it may be cut short") from None
    if not isinstance(found, dict):
        raise _Damaged("not a JSON object")
    return found


def _names(found: Mapping[str, Any], key: str) -> list[bytes]:
    """Return what names each block as bytes; a number and a word never look alike."""
    names = found.get(key)
    if isinstance(names, list):
        try:
            return [_name(name) for name in names]
        except (OverflowError, TypeError, UnicodeEncodeError):
            pass
    kinds = "whole numbers below 2**64" if key == "hash_ids" else "whole numbers below 2**64, or words"
    raise _Damaged(f"{key} must be a list of {kinds}")


def _name(name: Any) -> bytes:
    if type(name) is int:
        return b"#" + name.to_bytes(8, "big")
    if isinstance(name, str):
        return b"'" + name.encode()
    raise TypeError


def _number(found: Mapping[str, Any], key: str) -> float:
    value = found.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**53:  # nor NaN
        return float(value)
    raise _Damaged(f"{key} must be a number, not {_shown(value)}")


def _whole_number(found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is int and 0 <= value <= _MOST_TOKENS:
        return value
    raise _Damaged(f"{key} must be a whole number of tokens, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
