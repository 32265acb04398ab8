# SPDX-License-Identifier: Apache-2.0
"""What vLLM needs for several ranks on fake GPUs: collectives through host memory and gloo, in the
place of NCCL, which refuses, and the lookup of a rank's part of the embeddings.

A collective waits for the caller's stream, as its bytes pass the host.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask

STAND_INS = {
    "CudaCommunicator": "Collectives wait for the stream, and go through host memory and gloo.",
    "vocab_parallel_embedding": "What vLLM does where it has no kernel: a mask, a lookup, and zeros.",
}
"""What stands in for parts of vLLM here, each with what it does."""
SCHEMA = "(Tensor! out, Tensor input_ids, Tensor weight, int a, int b, int c, int d, int e) -> ()"


class HostCommunicator(DeviceCommunicatorBase):
    """What vLLM's groups call for tensors on the GPU."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors."""
        on_host = input_.cpu()
        distributed.all_reduce(on_host, group=self.cpu_group)
        return on_host.to(input_.device)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all ranks' tensors, one behind the other."""
        on_host = input_.cpu().contiguous()
        parts = [torch.empty_like(on_host) for _ in range(self.world_size)]
        distributed.all_gather(parts, on_host, group=self.cpu_group)
        return torch.cat(parts, dim).to(input_.device)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return all ranks' tensors, one behind the other, to one rank of the group."""
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Give each rank the tensor of one."""
        on_host = tensor.cpu()
        distributed.broadcast(on_host, self.ranks[src], group=self.cpu_group)
        tensor.copy_(on_host)
        return tensor

    def __getattr__(self, name: str) -> Any:
        """What only vLLM's own for GPUs has is not there: ``None`` says so to those who ask."""
        if name.endswith("_comm"):
            return None
        raise AttributeError(name)


def vocab_parallel_embedding(out: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, *shard: int) -> None:
    """Do what vLLM's kernel does, as vLLM does it where it has no kernel."""
    here, elsewhere = get_masked_input_and_mask(ids, *shard)
    torch.index_select(weight, 0, here.long(), out=out)
    out.masked_fill_(elsewhere.unsqueeze(-1), 0)


@cache
def plugin() -> None:
    """Is called by vLLM in each of its processes as it starts."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(f"vocab_parallel_embedding{SCHEMA}")
    library.impl("vocab_parallel_embedding", vocab_parallel_embedding, "CUDA")
    _kept.append(library)


_kept: list[Any] = []
"""What torch forgets with its last reference."""
