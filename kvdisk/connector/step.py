# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's output says of a step, in the terms of the manager."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.connector.kv_groups import GroupIds
from kvdisk.connector.tables import block_tables
from kvdisk.context import HandedState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput


class StepInput(NamedTuple):
    """One step of the scheduler.

    ``scheduled``: the tokens that each request computes. ``preempted``: the victims.
    ``overwritten``: see ``overwritten_blocks``. ``states``: the recurrent states that are handed
    off, by request; states after a part of a block are among them. ``block_state``: who knows the
    block tables.
    """

    scheduled: Mapping[str, int]
    preempted: Collection[str]
    overwritten: Collection[int]
    states: Mapping[str, Sequence[HandedState]]
    block_state: KVConnectorBlockState | None
    groups: GroupIds

    @classmethod
    def of(cls, output: SchedulerOutput, groups: GroupIds) -> StepInput:
        """Read a scheduler's output."""
        return cls(
            output.num_scheduled_tokens,
            output.preempted_req_ids or (),
            overwritten_blocks(output, groups),
            _handed_states(output, groups),
            output.kv_connector_block_state,
            groups,
        )

    @property
    def scheduled_tokens(self) -> int:
        """The tokens of all requests."""
        return int(sum(self.scheduled.values()))

    def tables(self, request_id: str) -> list[Sequence[int]] | None:
        """Return the block tables of a request, those of the groups that are stored; None where it
        has none."""
        found = block_tables(self.block_state, request_id)
        return None if found is None else self.groups.tables(found)


def overwritten_blocks(output: SchedulerOutput, groups: GroupIds) -> set[int]:
    """Return the GPU blocks that a model runner may write to before it calls
    ``handle_preemptions``.

    The second-generation runner zeroes new blocks, copies shared blocks and moves recurrent states
    into new blocks before it; the first-generation runner does so after it.
    """
    found = set(output.new_block_ids_to_zero or ())
    if output.kv_cache_block_copies:
        found.update(copy.dst_block_id for copy in output.kv_cache_block_copies)
    if groups.of_states:
        new = [request.block_ids for request in output.scheduled_new_reqs]
        new += [tables for tables in output.scheduled_cached_reqs.new_block_ids if tables is not None]
        found.update(block for tables in new for group_id in groups.of_states for block in tables[group_id])
    return found


def _handed_states(output: SchedulerOutput, groups: GroupIds) -> dict[str, list[HandedState]]:
    """Return the recurrent states of the requests without drafts. vLLM: with drafts, a state comes
    to its block only after the hook that begins copies."""
    state, drafted = output.kv_connector_block_state, output.scheduled_spec_decode_tokens
    if state is None or not state.boundary_state_offloads:
        return {}
    return {
        request_id: [HandedState(groups.number_of(group_id), *place) for group_id, *place in states]
        for request_id, states in state.boundary_state_offloads.items()
        if not drafted.get(request_id)
    }
