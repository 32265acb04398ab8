# SPDX-License-Identifier: Apache-2.0
"""What kvdisk does where calls of CUDA fail: memory is given back only when no copy is at work on
it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest
import torch

from fake_gpu import control
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, CudaLanes, LayerBlocks, Slots

pytestmark = pytest.mark.fake_gpu
BLOCKS, BLOCK_BYTES = 8, 4096


@pytest.mark.parametrize("forbidden", [0, 3], ids=["at once", "while graphs are captured elsewhere"])
def test_nothing_is_under_way_once_copies_have_settled(forbidden):
    """900: an event may not be waited for while another thread captures strictly."""
    control.reseed("late")
    groups = [LayerBlocks([torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda")])]
    before = control.violations()
    with closing(Arena([BLOCK_BYTES + 4096], [BLOCKS], pin=True)) as arena:
        arena.await_pinned()
        copier = CudaCopier(groups, CudaLanes(), 0)
        copier.gather(0, list(range(BLOCKS)), Slots(arena, 0, list(range(BLOCKS))), copier.compute_done())
        assert control.pending()
        control.fail("cudaStreamSynchronize", 900, times=forbidden)
        copier.settle()
        assert not control.host_touches(arena.address_of(0), BLOCKS * BLOCK_BYTES, writes=True)
    assert control.violations() == before


_CLOSES_STAGING = """
import torch
from fake_gpu import control
from kvdisk.worker.copier import CudaLanes
from kvdisk.worker.gpu_staging import GpuStaging

staging = GpuStaging([8192], [4], CudaLanes())
for call in ("cudaFree", "cudaStreamSynchronize", "cudaEventSynchronize"):
    control.fail(call, 700, times=1 << 40)
staging.close()
staging.close()
print("closed")
"""


def test_a_broken_gpu_does_not_end_the_process_when_its_staging_is_closed():
    """torch does that where it cannot give a pool's memory back. vLLM closes its scheduler, with
    what the index has still to commit, behind its workers."""
    done = subprocess.run([sys.executable, "-c", _CLOSES_STAGING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
