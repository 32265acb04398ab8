# SPDX-License-Identifier: Apache-2.0
"""The platform that ``fake_gpu_vllm`` names; imported by vLLM, once that is ready for it."""

from __future__ import annotations

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform


class FakeGpuPlatform(NonNvmlCudaPlatform):
    """CUDA's, but for what asks NVIDIA's libraries."""

    dist_backend = "gloo"

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's compiled kernels are for GPUs."""

    @classmethod
    def is_fully_connected(cls, physical_device_ids) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.cuda.get_device_properties(device_id).multi_processor_count

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "fake_gpu_ranks.HostCommunicator"
