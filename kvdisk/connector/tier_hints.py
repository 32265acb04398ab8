# SPDX-License-Identifier: Apache-2.0
"""KV hints of requests behind vLLM's own ``OffloadingConnector``: retain, pin and demote, as for
``KVDiskConnector``. Scheduler thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from kvdisk.blocks import BlockKey, groups_of
from kvdisk.connector.controls import Controls
from kvdisk.errors import QuietLog
from kvdisk.manager.kv_hints import PREFETCH
from kvdisk.manager.requests import KVHint

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

    from kvdisk.connector.tier_store import TierStore

logger = logging.getLogger("kvdisk.connector")


@dataclass(frozen=True)
class HintedPrompt:
    """See ``kv_hints.Hinted``."""

    kv_hints: Sequence[KVHint]
    prompt_tokens: int
    keys: Sequence[Sequence[BlockKey]]


@dataclass(slots=True)
class _Sent:
    """What came with a request. ``prompt_tokens``: of its prompt, in full chunks; None: vLLM has
    not hashed it yet."""

    context: ReqContext
    kv_hints: Sequence[KVHint]
    prompt_tokens: int | None = None


class TierHints:
    """Tells the store what the KV hints of requests say. ``chunk_tokens``: of each group.
    ``blocks``: makes kvdisk's keys of vLLM's."""

    def __init__(self, chunk_tokens: Sequence[int], blocks: Callable[[Sequence[OffloadKey]], list[BlockKey]]) -> None:
        self._chunk_tokens = chunk_tokens
        self._blocks = blocks
        self._controls = Controls()
        self._log = QuietLog(time.monotonic, logger)
        self._sent: dict[str, _Sent] = {}
        """Of the requests that have not ended, those with hints."""
        self._new: dict[str, _Sent] = {}
        """Those of them that the store has not been told of."""

    def begin(self, context: ReqContext) -> None:
        """A request has come."""
        kv_hints = self._controls.hints(context.kv_hints, context.kv_transfer_params)
        if any(hint.action == PREFETCH for hint in kv_hints):
            text = f"kv.{PREFETCH} does nothing behind vLLM's own connector, which fills its memory itself; ignored."
            self._log.warn(PREFETCH, text)
            kv_hints = tuple(hint for hint in kv_hints if hint.action != PREFETCH)
        if kv_hints:
            self._sent[context.req_id] = self._new[context.req_id] = _Sent(context, kv_hints)

    def tell_new(self, store: TierStore) -> None:
        """Tell the store of the requests whose prompt vLLM has hashed by now.

        vLLM: it names the chunks of a prompt at its first lookup, or when it is first scheduled: in
        the same step, before a token is generated.
        """
        named = [name for name, sent in self._new.items() if self._learn_prompt(sent)]
        for name in named:
            store.hint(self._prompt_of(self._new.pop(name)), ended=False)

    def end(self, context: ReqContext) -> HintedPrompt | None:
        """A request has ended: return its prompt, where the store is to be told so."""
        self._new.pop(context.req_id, None)
        sent = self._sent.pop(context.req_id, None)
        return self._prompt_of(sent) if sent is not None and self._learn_prompt(sent) else None

    def forget(self) -> None:
        """A reset has dropped all blocks, and what was said of them."""
        self._sent.clear()
        self._new.clear()

    @staticmethod
    def _learn_prompt(sent: _Sent) -> bool:
        """Note how long a prompt is, if that is known by now; return whether it is."""
        if sent.prompt_tokens is None and sent.context._offload_key_positions:
            sent.prompt_tokens = max(sent.context._offload_key_positions.values())
        return sent.prompt_tokens is not None

    def _prompt_of(self, sent: _Sent) -> HintedPrompt:
        """Return the prompt with the keys of its chunks. vLLM also places states that end within a
        chunk: those are left out."""
        assert sent.prompt_tokens is not None, "it is learnt before"
        positions: Mapping[OffloadKey, int] = sent.context._offload_key_positions
        placed = [key for key in sorted(positions, key=positions.__getitem__) if positions[key] <= sent.prompt_tokens]
        keys: list[list[BlockKey]] = [[] for _ in self._chunk_tokens]
        blocks = self._blocks(placed)
        for key, block, group in zip(placed, blocks, groups_of(blocks), strict=True):
            if positions[key] % self._chunk_tokens[group] == 0:
                keys[group].append(block)
        return HintedPrompt(sent.kv_hints, sent.prompt_tokens, keys)
