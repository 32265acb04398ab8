# SPDX-License-Identifier: Apache-2.0
"""A trace, and how it is read: requests in order, each with its blocks. A line that is damaged ends
the reading with one sentence that names it.

Mooncake, one JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length``
(tokens), ``hash_ids`` (one number for each block of the prompt; the last block may be partial).

Azure LLM inference, CSV with a header: ``TIMESTAMP`` (date and time), ``ContextTokens``,
``GeneratedTokens``; other columns are ignored. It does not say which prompts share blocks, so none
do: it shows what is written, not what hits.

Generic, one JSON object a line, with one of

    blocks      a list of numbers or words, one for each block, the last of which may be partial
    tokens      a list of token ids
    prompt      text; four bytes of UTF-8 stand for a token

and, where known, ``time_s`` (seconds), ``prompt_tokens`` (with ``blocks``; else the last block
counts as full) and ``output_tokens``. Of ``tokens`` and ``prompt`` full blocks count only, as in
vLLM. Other fields are ignored.

kvdisk's own (``kvdisk.request_trace``): the generic one with ``blocks``, behind a line that says of
what blocks it is. Its requests are in the order in which they ended, and are put in that of their
arrival.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from kvdisk.errors import KvdiskError
from kvdisk.request_trace import VERSION

HASH_BYTES = 32
"""The length of vLLM's sha256 hashes."""
_BLOCK_TOKENS, _MOONCAKE_BLOCK_TOKENS = 16, 512
_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 24
"""Tokens of one prompt at most."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NO_IDENTITY = (
    "an Azure trace does not say which prompts share blocks: here no two requests share any, so nothing can hit,"
    " and only what would be written is of use."
)
BYTES_FOR_TOKENS = f"prompts are text: {_BYTES_PER_TOKEN} bytes stand for a token."

Row = Mapping[str, Any]
"""A line, by field or column. Values from CSV are text."""


class TraceError(KvdiskError):
    """A trace cannot be read: one sentence, with the file and the line."""


class TracedRequest(NamedTuple):
    """One request. ``hashes``: of its prompt's blocks, in order. ``tokens``: those of the prompt
    that its blocks have.

    ``time_s``: its arrival, in seconds from an origin of the trace's own. The last block may be a
    partial one.
    """

    time_s: float
    hashes: list[bytes]
    tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """The requests of a trace. ``form``: the name of its form. ``notes``: what a reader of the
    figures has to know."""

    name: str
    form: str
    block_tokens: int
    requests: Sequence[TracedRequest]
    notes: tuple[str, ...] = field(default=())
    block_bytes: int | None = None
    """Bytes of a block, where the trace says them."""

    @cached_property
    def references(self) -> int:
        """Blocks of all requests: each is one reference."""
        return sum(len(request.hashes) for request in self.requests)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.tokens for request in self.requests)

    @cached_property
    def distinct(self) -> int:
        """The number of distinct blocks."""
        return len({block for request in self.requests for block in request.hashes})

    @cached_property
    def most_hits(self) -> int:
        """Tokens of prompts that an endless tier would hit: those that came before, behind the same
        blocks."""
        seen: set[bytes] = set()
        tokens = 0
        for request in self.requests:
            known = next((at for at, block in enumerate(request.hashes) if block not in seen), len(request.hashes))
            tokens += self.token_span(request, 0, known)
            seen.update(request.hashes)
        return tokens

    @cached_property
    def longest(self) -> int:
        """Blocks of the longest prompt."""
        return max((len(request.hashes) for request in self.requests), default=0)

    def in_units(self, unit_tokens: int | None) -> Trace:
        """Return the trace with units: blocks one after the other that are found, kept and loaded
        as one, of ``unit_tokens`` together; None: each is one block. The tokens of prompts behind
        their last whole unit are left, and never hit. Raises TraceError."""
        if unit_tokens is None:
            return self
        count, rest = divmod(unit_tokens, self.block_tokens)
        if rest or not count:
            raise TraceError(f"a unit of {unit_tokens} tokens is not of whole blocks of {self.block_tokens} tokens")
        requests = [request._replace(hashes=request.hashes[count - 1 :: count]) for request in self.requests]
        if not any(request.hashes for request in requests):
            raise TraceError(f"{self.name} has no request with a unit of {unit_tokens} tokens")
        block_bytes = self.block_bytes and count * self.block_bytes
        return replace(self, block_tokens=unit_tokens, requests=requests, block_bytes=block_bytes)

    def token_span(self, request: TracedRequest, first: int, last: int) -> int:
        """Return the tokens of a request's blocks from ``first`` to before ``last``; the last block
        may be partial."""
        return min(last * self.block_tokens, request.tokens) - min(first * self.block_tokens, request.tokens)


class Chain:
    """Gives blocks their hashes. A block with the same content behind the same blocks is the same
    block, even the same object.

    So a trace whose numbers name content is read as correctly as one whose numbers name prefixes.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], bytes] = {}

    def hashes(self, contents: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks of this content, each behind those before it."""
        known, parent, found = self._known, b"", []
        for content in contents:
            block = known.get((parent, content))
            if block is None:
                block = known[parent, content] = blake2b(parent + content, digest_size=HASH_BYTES).digest()
            found.append(block)
            parent = block
        return found


# -- reading -----------------------------------------------------------------------------------


class Form(StrEnum):
    """The form of a trace. AUTO: known by its first line."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    JSONL = "jsonl"
    KVDISK = "kvdisk"


class _Damaged(Exception):
    """A line is damaged. The text says how, to follow ``line 7: ``."""


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
    wrong, number = "", 0

    def lines_of(source: Iterable[bytes]) -> Iterator[str]:
        """Yield the lines that are not blank."""
        nonlocal number
        for number, raw in enumerate(source, start=1):
            if line := raw.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                yield line

    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            source = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            return _read(path, lines_of(source), form, block_tokens, limit, whole)
    except _Damaged as damage:
        wrong = str(damage)
    except UnicodeDecodeError:
        wrong = "not text in UTF-8"
    except csv.Error as error:
        wrong = f"not a line of CSV ({error})"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    raise TraceError(f"{path}, line {number}: {wrong}")


def _read(
    path: Path, lines: Iterator[str], form: Form, block_tokens: int | None, limit: int | None, whole: bool
) -> Trace:
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path} is empty")
    if form is Form.AUTO:
        form = _form_of(first)
    block_bytes = None
    if form is Form.KVDISK:
        head, first = _object(first), next(lines, "")
        block_tokens, block_bytes = _whole_number(head, "block_tokens"), int(_number(head, "block_bytes"))
        if head.get("kvdisk_trace") != VERSION or not block_tokens or not block_bytes:
            raise _Damaged(f"not the first line of a trace of kvdisk {VERSION}")
        if not first:
            raise TraceError(f"{path} has no request yet")
    if block_tokens is None:
        block_tokens = _MOONCAKE_BLOCK_TOKENS if form is Form.MOONCAKE else _BLOCK_TOKENS
    lines = chain((first,), lines)
    parser = _Parser(block_tokens)
    rows: Iterable[Row] = map(_object, lines)
    if form is Form.AZURE:
        rows = csv.DictReader(lines, skipinitialspace=True, strict=True)
    parse = {Form.AZURE: parser.azure, Form.MOONCAKE: parser.mooncake}.get(form, parser.generic)
    found = [parse(row) for row in islice(rows, limit)]
    if form is Form.KVDISK:
        found.sort(key=lambda request: request.time_s)
    if whole:
        found = [
            request._replace(hashes=request.hashes[:full], tokens=full * block_tokens)
            for request in found
            for full in (request.tokens // block_tokens,)
        ]
    if not any(request.hashes for request in found):
        raise TraceError(f"{path} has no request with a block of {block_tokens} tokens")
    return Trace(path.name, form.value, block_tokens, found, tuple(parser.notes), block_bytes)


def _form_of(line: str) -> Form:
    if line.startswith("{"):
        found = _object(line)
        return Form.KVDISK if "kvdisk_trace" in found else Form.MOONCAKE if "hash_ids" in found else Form.JSONL
    if all(name in line for name in _AZURE_COLUMNS):
        return Form.AZURE
    raise _Damaged(f"neither a JSON object nor a header with {', '.join(_AZURE_COLUMNS)}; see --form")


class _Parser:
    """Makes requests of rows. ``notes``: what a reader of the figures has to know, as keys."""

    def __init__(self, block_tokens: int) -> None:
        self.notes: dict[str, None] = {}
        self._block_tokens = block_tokens
        self._chain = Chain()
        self._serial = 0

    def mooncake(self, row: Row) -> TracedRequest:
        """See the module."""
        names, tokens = _packed(row, "hash_ids"), _whole_number(row, "input_length")
        return self._request(_number(row, "timestamp") / 1000, names, tokens, _whole_number(row, "output_length", 0))

    def azure(self, row: Row) -> TracedRequest:
        """See the module."""
        self.notes[NO_IDENTITY] = None
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"].strip())
            time_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
        except (KeyError, AttributeError, ValueError, OverflowError):
            raise _Damaged(f"TIMESTAMP must be a date and a time, not {_shown(row.get('TIMESTAMP'))}") from None
        count = _whole_number(row, "ContextTokens") // self._block_tokens
        head = self._serial.to_bytes(8, "big")
        self._serial += 1
        contents = [head + at.to_bytes(8, "big") for at in range(count)]
        return self._request(time_s, contents, None, _whole_number(row, "GeneratedTokens"))

    def generic(self, row: Row) -> TracedRequest:
        """See the module."""
        given = [name for name in ("blocks", "tokens", "prompt") if name in row]
        if len(given) != 1:
            also = f", not {' and '.join(given)}" if given else ""
            raise _Damaged(f"must have one of blocks, tokens and prompt{also}")
        time_s, output_tokens = _number(row, "time_s", 0.0), _whole_number(row, "output_tokens", 0)
        if given == ["blocks"]:
            tokens = _whole_number(row, "prompt_tokens") if "prompt_tokens" in row else None
            return self._request(time_s, _packed(row, "blocks", words=True), tokens, output_tokens)
        if given == ["tokens"]:
            data, width = b"".join(token[1:] for token in _packed(row, "tokens")), 8
        else:
            if not isinstance(row["prompt"], str):
                raise _Damaged("prompt must be text")
            data, width = row["prompt"].encode("utf-8", "surrogatepass"), _BYTES_PER_TOKEN
            self.notes[BYTES_FOR_TOKENS] = None
        size = width * self._block_tokens
        last = len(data) // size * size
        return self._request(time_s, [data[at : at + size] for at in range(0, last, size)], None, output_tokens)

    def _request(self, time_s: float, contents: list[bytes], tokens: int | None, output_tokens: int) -> TracedRequest:
        """Return a request. ``tokens``: given where the last block may be partial; None: all blocks
        are full."""
        count, each = len(contents), self._block_tokens
        if tokens is None:
            tokens = count * each
        if not (count - 1) * each < tokens <= count * each and (tokens or contents):
            raise _Damaged(f"{count} blocks of {each} tokens cannot be a prompt of {tokens}; see --block-tokens")
        return TracedRequest(time_s, self._chain.hashes(contents), tokens, output_tokens)


# -- values ------------------------------------------------------------------------------------


def _object(line: str) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise _Damaged("not a JSON object; it may be cut short") from None
    if not isinstance(found, dict):
        raise _Damaged("not a JSON object")
    return found


def _packed(row: Row, key: str, *, words: bool = False) -> list[bytes]:
    """Return a list of numbers, or of words too, as bytes; a number and a word never look alike."""
    values = row.get(key)
    try:
        if isinstance(values, list) and (words or not any(isinstance(value, str) for value in values)):
            return [
                b"'" + value.encode() if isinstance(value, str) else b"#" + value.to_bytes(8, "big") for value in values
            ]
    except (AttributeError, OverflowError, UnicodeEncodeError):
        pass
    raise _Damaged(f"{key} must be a list of whole numbers below 2**64{', or words' if words else ''}")


def _number(row: Row, key: str, default: float | None = None) -> float:
    value = row.get(key, default)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**53:  # nor NaN
        return float(value)
    raise _Damaged(f"{key} must be a number, not {_shown(value)}")


def _whole_number(row: Row, key: str, default: int | None = None) -> int:
    value = row.get(key, default)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is int and 0 <= value <= _MOST_TOKENS:
        return value
    raise _Damaged(f"{key} must be a whole number of tokens, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
