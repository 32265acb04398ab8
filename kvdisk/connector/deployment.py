# SPDX-License-Identifier: Apache-2.0
"""Where an engine's workers are, and what each of them has."""

from __future__ import annotations

from vllm.config import VllmConfig

from kvdisk.worker.host_memory import Deployment

_OWN_EXECUTORS = ("uni", "mp")
"""The executors whose workers are on the scheduler's machine, or where ``nnodes`` says."""


def others_place_workers(vllm_config: VllmConfig) -> bool:
    """Return whether somebody else than vLLM says on which machines workers are: Ray, a launcher,
    or an executor that is not vLLM's own. Then one that is alone may be on another machine, too."""
    parallel = vllm_config.parallel_config
    return parallel.distributed_executor_backend not in _OWN_EXECUTORS or parallel.data_parallel_backend == "ray"


def deployment_of(vllm_config: VllmConfig) -> Deployment:
    """Return how the workers of a configuration are placed. In the server's process this covers all
    data-parallel ranks of the host, in an engine's process perhaps only its own.

    Where others place the workers, perhaps not here, one rank is all that is known.
    """
    parallel = vllm_config.parallel_config
    ranks = ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size
    if others_place_workers(vllm_config):
        return Deployment(ranks, 1, ranks)
    return Deployment(ranks, max(1, parallel.data_parallel_size_local), parallel.nnodes_within_dp)


def hosts_of(vllm_config: VllmConfig, *, replicated: bool) -> int:
    """Return on how many hosts the ranks of an engine may lie. ``replicated``: see ``Geometry``.

    vLLM: ranks of ``nnodes`` machines are numbered one machine after the other. Ray places them as
    it likes, so that those of one host cannot share a file: then they must all be on one.
    """
    return 1 if replicated and others_place_workers(vllm_config) else deployment_of(vllm_config).hosts


def data_parallel_rank_of(vllm_config: VllmConfig) -> int | None:
    """Return an engine's number among its data-parallel ranks; None where it is alone.

    vLLM: the ranks of a model without experts know nothing else of each other.
    """
    parallel = vllm_config.parallel_config
    return None if parallel.data_parallel_rank_local is None else int(parallel.data_parallel_index)


def ranks_of_stage(vllm_config: VllmConfig) -> int:
    """Return how many workers have the layers of one stage. vLLM: DCP divides tokens among them,
    and adds no worker."""
    parallel = vllm_config.parallel_config
    return parallel.tensor_parallel_size * parallel.prefill_context_parallel_size  # type: ignore[no-any-return]


def rank_of(vllm_config: VllmConfig) -> int:
    """Return a worker's rank among those that share its engine's blocks."""
    parallel = vllm_config.parallel_config
    return parallel.rank % (ranks_of_stage(vllm_config) * parallel.pipeline_parallel_size)  # type: ignore[no-any-return]


def sleeps(vllm_config: VllmConfig) -> bool:
    """Return whether the engine's GPU memory can be unmapped for a sleep, and mapped again."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
