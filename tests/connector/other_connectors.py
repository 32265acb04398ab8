# SPDX-License-Identifier: Apache-2.0
"""Another connector for ``MultiConnector``: promises a number of tokens, loads them, and notes its
calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

ANOTHER, SHAKING = "OtherConnector", "ShakingConnector"


class Load(NamedTuple):
    """``holes``: GPU blocks that it leaves unfilled, and says so."""

    request_id: str
    start: int
    end: int
    holes: Collection[int]
    asynchronous: bool


@dataclass
class OtherMetadata(KVConnectorMetadata):
    """The loads of a step, which end in it."""

    loads: list[Load] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """``promise``: tokens that each request may have of it (vLLM's own prefix included);
    ``asynchronous``: how. ``holds``: no load begins. ``holes``: the blocks of a load that it does
    not fill, by position. ``fill`` writes the KV of a load.
    """

    promise = 0
    asynchronous = True
    holds = False
    holes: Collection[int] = ()
    fill: Any = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.allocated: list[tuple[str, int]] = []
        self._loads: list[Load] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = max(0, min(self.promise, request.num_tokens - 1) - num_computed_tokens)
        return tokens, self.asynchronous and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            holes = {blocks.blocks[0][at].block_id for at in self.holes}
            start = self.promise - num_external_tokens
            self._loads.append(Load(request.request_id, start, self.promise, holes, self.asynchronous))

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        begun = [] if self.holds else self._loads
        self._loads = self._loads if self.holds else []
        return OtherMetadata(begun)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        for load in self._get_connector_metadata().loads:
            self.fill(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        loads = self._get_connector_metadata().loads
        return None, {load.request_id for load in loads if load.asynchronous}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*(load.holes for load in self._get_connector_metadata().loads))

    def _nothing(self, *arguments: Any, **more: Any) -> None:
        pass

    register_kv_caches = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing


class Handshake(KVConnectorHandshakeMetadata):
    """What the workers of ``ShakingConnector`` send."""


class ShakingConnector(OtherConnector):
    """Has a handshake, and takes no other, as NIXL."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Handshake()

    def set_xfer_handshake_metadata(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        assert all(isinstance(one, Handshake) for one in metadata.values()), "another's handshake"

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata


KVConnectorFactory.register_connector(ANOTHER, __name__, ANOTHER)
KVConnectorFactory.register_connector(SHAKING, __name__, SHAKING)
