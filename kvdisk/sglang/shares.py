# SPDX-License-Identifier: Apache-2.0
"""What each rank's store may have of what the user allows to all ranks of a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvdisk.config import Config
from kvdisk.store import JointCap


def share_of(config: Config, storage: Any) -> tuple[Config, JointCap | None]:
    """Return a rank's share of a configuration, and what bounds the stores of all ranks of this
    host together; None: there is one rank. ``storage``: SGLang's configuration of the backend."""
    from sglang.srt import runtime_context as context

    arguments = context.get_server_args()
    hosts = max(1, int(getattr(arguments, "nnodes", 1) or 1))
    replicas = storage.pp_size * max(1, int(getattr(arguments, "dp_size", 1) or 1))
    # SGLang: rank 0 of a group writes for all with MLA. One that only reads writes what it got from
    # another host.
    writers = 1 if storage.is_mla_model and config.remote is None else storage.tp_size
    shared = _share(config, -(-writers * replicas // hosts))
    if storage.tp_size * replicas <= hosts or config.nvme_bytes is None:
        return shared, None
    # The same after a restart, so that the first rank leaves what the others will take over.
    name = f"SGLang: {arguments.model_path} at port {arguments.port}"
    # With attention that is data-parallel the first is within a replica's group.
    member = f"tp{storage.tp_rank} pp{storage.pp_rank} dp{storage.dp_rank}"
    return shared, JointCap(name, config.nvme_bytes, member)


def _share(config: Config, stores: int) -> Config:
    per_day = config.nvme_write_bytes_per_day
    return replace(
        config,
        nvme_bytes=None if config.nvme_bytes is None else config.nvme_bytes // stores,
        nvme_write_bytes_per_day=None if per_day is None else per_day // stores,
        remote_write_bytes_per_s=config.remote_write_bytes_per_s // stores,
    )
