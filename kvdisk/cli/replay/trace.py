# SPDX-License-Identifier: Apache-2.0
"""What a trace is once it is read: requests in order, each with its blocks. Pure.

A block's hash covers all before it, as vLLM's does: a block is known again only behind the same
prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

from kvdisk.errors import KvdiskError

HASH_BYTES = 32
"""As long as those of vLLM's sha256."""


class TraceError(KvdiskError):
    """A trace cannot be read: one sentence, with the file and the line."""


class TracedRequest(NamedTuple):
    """One request. ``hashes``: of its prompt's blocks, in order. ``tokens``: of the prompt, as far
    as it has blocks.

    ``time_s``: when it came, in seconds from an origin of the trace's own. The last block may be a
    partial one.
    """

    time_s: float
    hashes: list[bytes]
    tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """The requests of a trace. ``form``: its name. ``notes``: what a reader of the figures has to
    know."""

    name: str
    form: str
    block_tokens: int
    requests: Sequence[TracedRequest]
    notes: tuple[str, ...] = field(default=())

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
        """Blocks that differ."""
        return len({block for request in self.requests for block in request.hashes})

    @cached_property
    def longest(self) -> int:
        """Blocks of the longest prompt."""
        return max((len(request.hashes) for request in self.requests), default=0)

    def token_span(self, request: TracedRequest, first: int, last: int) -> int:
        """Return the tokens of a request's blocks from ``first`` to before ``last``; the last block
        may be partial."""
        return min(last * self.block_tokens, request.tokens) - min(first * self.block_tokens, request.tokens)


class Chain:
    """Gives blocks their hashes. What follows the same blocks with the same content is the same
    block, object and all.

    So a trace whose numbers name content, not prefixes, is read as rightly as one whose numbers
    name prefixes.
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
