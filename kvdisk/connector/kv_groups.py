# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV-cache groups: the kinds of layers that are served, which groups are stored, and what
each process knows of their sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


_Reach = tuple[int | None, int | None]
"""The window and the chunk that a kind of layers reads in, in tokens; None where there is none."""


def _all(_spec: KVCacheSpec) -> _Reach:
    return None, None


def _window(spec: SlidingWindowSpec) -> _Reach:
    return spec.sliding_window + spec.extra_retained_tokens, None


REACHES: dict[type[KVCacheSpec], Callable[[Any], _Reach]] = {
    FullAttentionSpec: _all,
    SinkFullAttentionSpec: _all,
    RSWASpec: _all,
    MLAAttentionSpec: _all,
    SlidingWindowSpec: _window,
    SlidingWindowMLASpec: _window,
    ChunkedLocalAttentionSpec: lambda spec: (None, spec.attention_chunk_size),
    MambaSpec: lambda _spec: (2, None),
}
"""The kinds of KV-cache specification that are supported. Exact classes: a subclass may keep its KV
in another way."""


def layer_specs(spec: KVCacheSpec, layer_names: Sequence[str]) -> dict[str, KVCacheSpec]:
    """Return the specification of each of these layers."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in layer_names}
    return dict.fromkeys(layer_names, spec)


def specs_of(group: KVCacheGroupSpec) -> Collection[KVCacheSpec]:
    """Return the kinds of layers that a group has, on any stage of the pipeline."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def payload_bytes(group: KVCacheGroupSpec) -> int:
    """Return the bytes of a block of a group, in the layers that the group names."""
    specs = layer_specs(group.kv_cache_spec, group.layer_names)
    return sum(spec.real_page_size_bytes for spec in specs.values())


def element_bytes(groups: Iterable[KVCacheGroupSpec]) -> int:
    """Return the bytes of an element of these groups' blocks; 1 where they have several sizes."""
    specs = [spec for group in groups for spec in specs_of(group)]
    sizes = {getattr(spec, "dtype", torch.uint8).itemsize for spec in specs}  # states have several types
    return sizes.pop() if len(sizes) == 1 else 1


def keeps_states(group: KVCacheGroupSpec) -> bool:
    """Return whether a group keeps recurrent states."""
    specs = layer_specs(group.kv_cache_spec, group.layer_names).values()
    return any(isinstance(spec, MambaSpec) for spec in specs)


def has_other_kv_of_answers(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> bool:
    """Return whether generated tokens may have other KV than the same tokens in a prompt. vLLM:
    with reference windows they see less, and diffusion may hand out tokens whose KV it has not
    computed."""
    return vllm_config.model_config.is_diffusion or any(isinstance(spec, RSWASpec) for spec in specs_of(group))


def has_drafter(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> bool:
    """Return whether a drafter's layers may be in a group. vLLM: where it marks no group they may
    be in any, but not beside recurrent state."""
    if all(isinstance(spec, MambaSpec) for spec in specs_of(group)):
        return False
    speculative = vllm_config.speculative_config
    marked = any(each.is_eagle_group for each in kv_cache_config.kv_cache_groups)
    return group.is_eagle_group or (not marked and speculative is not None and speculative.use_eagle_block_drop())


class GroupIds:
    """vLLM's indices of the KV-cache groups that are stored; kvdisk numbers these 0, 1, ...

    Groups that vLLM's prefix cache leaves out (a window that is computed again, a ring of one
    block) are left out here too: a hit needs nothing of them. ``of_states``: those of recurrent
    states.
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.ids = kv_cache_config.prefix_cacheable_group_ids
        self._numbers = {group_id: number for number, group_id in enumerate(self.ids)}
        groups = kv_cache_config.kv_cache_groups
        self.of_states = [group_id for group_id in self.ids if keeps_states(groups[group_id])]

    def number_of(self, group_id: int) -> int:
        """Return kvdisk's number of one of vLLM's groups that are stored."""
        return self._numbers[group_id]

    def tables(self, block_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the block tables of the groups that are stored, from those of all vLLM's
        groups."""
        return [block_ids[group_id] for group_id in self.ids]


def sizes_are_certain(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether the scheduler's configuration has the sizes of all layers, and not only of
    each group's first layer, or of the first stage.

    vLLM takes the first layer's size for all layers of a group there. All that shows their
    difference is that layers which differ are in KV tensors of their own. Of a pipeline the
    scheduler has the first stage's layers only.
    """
    return vllm_config.parallel_config.pipeline_parallel_size == 1 and all(
        sum(not names.isdisjoint(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors) <= 1
        for names in (set(group.layer_names) for group in kv_cache_config.prefix_cacheable_groups)
    )


def groups_by_stage(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[list[KVCacheGroupSpec]]:
    """Return a worker's KV-cache groups as each stage of its pipeline has them, the first stage
    first. The workers of all stages call this together at the start, and wait for each other."""
    groups = kv_cache_config.prefix_cacheable_groups
    found = [groups] * vllm_config.parallel_config.pipeline_parallel_size
    if len(found) > 1:
        torch.distributed.all_gather_object(found, groups, group=get_pp_group().cpu_group)
    return found


def handshake_of(stages: list[list[KVCacheGroupSpec]]) -> list[list[KVCacheGroupSpec]] | None:
    """Return the groups of all stages where the scheduler's groups lack something; otherwise None,
    so that other connectors' handshakes go on."""
    uniform = any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in stages[0])
    return stages if len(stages) > 1 or uniform else None
