# SPDX-License-Identifier: Apache-2.0
"""Reads traces, gzip or plain. A line that is damaged ends the reading with one sentence that names it.

Mooncake, one JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one
number for each block of the prompt; the last block may be partial).

Azure LLM inference, CSV with a header: ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``; other
columns are ignored. It does not say which prompts share blocks, so none do: it tells what is written, not what hits.

Generic, one JSON object a line, with one of

    blocks      a list of numbers or words, one for each block, the last of which may be partial
    tokens      a list of token ids
    prompt      text; four bytes of UTF-8 stand for a token

and, where known, ``time_s`` (seconds), ``prompt_tokens`` (with ``blocks``; else the last block counts as full) and
``output_tokens``. Of ``tokens`` and ``prompt`` full blocks count only, as in vLLM. Other fields are ignored.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
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
    """Read a trace, or its first ``limit`` requests. ``whole``: leave partial blocks out. Raises TraceError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            return _read(path, source, form, block_tokens, limit, whole)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None


def _read(path: Path, source: BinaryIO, form: Form, block_tokens: int | None, limit: int | None, whole: bool) -> Trace:
    lines = _lines(path, source)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path} is empty")
    if form is Form.AUTO:
        form = _form_of(path, *first)
    if block_tokens is None:
        block_tokens = DEFAULT_BLOCK_TOKENS.get(form.value, _OTHER_BLOCK_TOKENS)
    parse = _parser(form, path, first, block_tokens)
    requests: list[TracedRequest] = []
    notes: dict[str, None] = dict.fromkeys((NO_IDENTITY,) if form is Form.AZURE else ())
    for number, line in lines if form is Form.AZURE else chain((first,), lines):
        if limit is not None and len(requests) >= limit:
            break
        try:
            request = parse(line, notes)
        except _Damaged as damage:
            raise TraceError(f"{path}, line {number}: {damage}") from None
        if whole:
            full = request.tokens // block_tokens
            request = request._replace(hashes=request.hashes[:full], tokens=full * block_tokens)
        requests.append(request)
    if not any(request.hashes for request in requests):
        raise TraceError(f"{path} has no request with a block of {block_tokens} tokens")
    return Trace(path.name, form.value, block_tokens, requests, tuple(notes))


def _lines(path: Path, source: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    for number, raw in enumerate(source, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise TraceError(f"{path}, line {number}: not text in UTF-8") from None
        if line:
            yield number, line


def _form_of(path: Path, number: int, line: str) -> Form:
    try:
        if line.startswith("{"):
            return Form.MOONCAKE if "hash_ids" in _object(line) else Form.JSONL
        if set(_AZURE_COLUMNS) <= set(_cells(line)):
            return Form.AZURE
    except _Damaged as damage:
        raise TraceError(f"{path}, line {number}: {damage}") from None
    raise TraceError(
        f"{path}, line {number}: neither a JSON object nor a header with {', '.join(_AZURE_COLUMNS)}; see --form"
    )


_Parse = Callable[[str, dict[str, None]], TracedRequest]


def _parser(form: Form, path: Path, first: tuple[int, str], block_tokens: int) -> _Parse:
    """Return what makes a request of a line, and may add a note. ``first``: the first line and its number."""
    blocks = Chain()
    if form is Form.MOONCAKE:
        return lambda line, _: _mooncake(_object(line), blocks, block_tokens)
    if form is Form.JSONL:
        return lambda line, notes: _generic(_object(line), blocks, block_tokens, notes)
    try:
        names = _cells(first[1])
    except _Damaged as damage:
        raise TraceError(f"{path}, line {first[0]}: {damage}") from None
    missing = [name for name in _AZURE_COLUMNS if name not in names]
    if missing:
        raise TraceError(f"{path}, line {first[0]}: the header has no column {missing[0]}")
    columns = tuple(map(names.index, _AZURE_COLUMNS))
    serial = iter(range(1 << 62))
    return lambda line, _: _azure(line, columns, blocks, block_tokens, serial)


# -- Mooncake ----------------------------------------------------------------------------------


def _mooncake(found: Mapping[str, Any], blocks: Chain, block_tokens: int) -> TracedRequest:
    time_ms = _number(found, "timestamp")
    tokens = _whole_number(found, "input_length")
    output_tokens = _whole_number(found, "output_length") if "output_length" in found else 0
    contents = _names(found, "hash_ids")
    _check_length(contents, tokens, block_tokens)
    return TracedRequest(time_ms / 1000, blocks.hashes(contents), tokens, output_tokens)


def _check_length(contents: list[bytes], tokens: int, block_tokens: int) -> None:
    if not (len(contents) - 1) * block_tokens < tokens <= len(contents) * block_tokens and (tokens or contents):
        raise _Damaged(
            f"{len(contents)} blocks of {block_tokens} tokens cannot be a prompt of {tokens}; see --block-tokens"
        )


# -- Azure -------------------------------------------------------------------------------------


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error as error:
        raise _Damaged(f"not a line of CSV ({error})") from None


def _azure(
    line: str, columns: tuple[int, ...], blocks: Chain, block_tokens: int, serial: Iterator[int]
) -> TracedRequest:
    cells = _cells(line)
    if len(cells) <= max(columns):
        raise _Damaged(f"{len(cells)} values, where the header has more")
    time, context, generated = (cells[column] for column in columns)
    try:
        when = datetime.fromisoformat(time)
        time_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _Damaged(f"TIMESTAMP must be a date and a time, not {_shown(time)}") from None
    tokens = _count_of("ContextTokens", context)
    output_tokens = _count_of("GeneratedTokens", generated)
    count = tokens // block_tokens
    head = next(serial).to_bytes(8, "big")
    contents = [head + position.to_bytes(8, "big") for position in range(count)]
    return TracedRequest(time_s, blocks.hashes(contents), count * block_tokens, output_tokens)


def _count_of(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST_TOKENS:
        return int(text)
    raise _Damaged(f"{name} must be a whole number of tokens, not {_shown(text)}")


# -- generic -----------------------------------------------------------------------------------


def _generic(found: Mapping[str, Any], blocks: Chain, block_tokens: int, notes: dict[str, None]) -> TracedRequest:
    time_s = _number(found, "time_s") if "time_s" in found else 0.0
    output_tokens = _whole_number(found, "output_tokens") if "output_tokens" in found else 0
    given = [name for name in ("blocks", "tokens", "prompt") if name in found]
    if len(given) != 1:
        raise _Damaged("must have one of blocks, tokens and prompt" + (f", not {' and '.join(given)}" if given else ""))
    if given == ["blocks"]:
        contents = _names(found, "blocks")
        tokens = len(contents) * block_tokens
        if "prompt_tokens" in found:
            tokens = _whole_number(found, "prompt_tokens")
            _check_length(contents, tokens, block_tokens)
        return TracedRequest(time_s, blocks.hashes(contents), tokens, output_tokens)
    if given == ["tokens"]:
        data, width = _token_bytes(found["tokens"]), 8
    else:
        if not isinstance(found["prompt"], str):
            raise _Damaged("prompt must be text")
        data, width = found["prompt"].encode("utf-8", "surrogatepass"), _BYTES_PER_TOKEN
        notes[BYTES_FOR_TOKENS] = None
    size = width * block_tokens
    count = len(data) // size
    contents = [data[at * size : (at + 1) * size] for at in range(count)]
    return TracedRequest(time_s, blocks.hashes(contents), count * block_tokens, output_tokens)


def _token_bytes(tokens: Any) -> bytes:
    if isinstance(tokens, list) and all(type(token) is int and 0 <= token < 1 << 64 for token in tokens):
        return b"".join(token.to_bytes(8, "big") for token in tokens)
    raise _Damaged("tokens must be a list of token ids, whole numbers that are not negative")


# -- values ------------------------------------------------------------------------------------


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
