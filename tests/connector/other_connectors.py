# SPDX-License-Identifier: Apache-2.0
"""Another connector for ``MultiConnector``, scheduler's half only: promises a number of tokens, and
notes its calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

ANOTHER = "OtherConnector"


@dataclass
class OtherMetadata(KVConnectorMetadata):
    """``loaded``: the requests whose asynchronous loads end in this step."""

    loaded: set[str] = field(default_factory=set)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """``promise``: tokens that each request may have of it (vLLM's own prefix included);
    ``asynchronous``: how."""

    promise = 0
    asynchronous = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.allocated: list[tuple[str, int]] = []
        self._loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = max(0, min(self.promise, request.num_tokens - 1) - num_computed_tokens)
        return tokens, self.asynchronous and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))
        if num_external_tokens and self.asynchronous:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        metadata, self._loading = OtherMetadata(self._loading), set()
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("no worker in these tests")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


KVConnectorFactory.register_connector(ANOTHER, __name__, ANOTHER)
