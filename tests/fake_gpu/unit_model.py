# SPDX-License-Identifier: Apache-2.0
"""A live model of whose blocks several are one of kvdisk's."""

from __future__ import annotations

from support.live_model import HASH_TOKENS, HashedRequest, LiveModel

from kvdisk.blocks import GROUP_BYTES, BlockKey, group_of

_TEXTS: dict[bytes, str] = {}
"""What was hashed, by hash."""


class TextRequest(HashedRequest):
    """A request whose hashes can be undone."""

    def hash_of(self, end_tokens: int) -> bytes:
        found = super().hash_of(end_tokens)
        _TEXTS[found] = self.tokens[:end_tokens]
        return found


class UnitModel(LiveModel):
    """``LiveModel`` whose hashes are as long as vLLM's, for requests that are ``TextRequest``."""

    def digests_of(self, key: BlockKey) -> list[bytes]:
        digest, group = key[:-GROUP_BYTES], self.geometry.groups[group_of(key)]
        if group.gpu_blocks == 1:
            return [digest]
        text = _TEXTS[digest]
        whole = HashedRequest("", text, len(text), len(text), [])
        ends = range(len(text) - group.block_tokens + HASH_TOKENS, len(text) + 1, HASH_TOKENS)
        return [whole.hash_of(end) for end in ends]
