# SPDX-License-Identifier: Apache-2.0
"""What a server that is trained beside its serving does, run inside an engine's child (``EngineChild.call``)."""

from __future__ import annotations

from typing import Any


def _scale(model: Any, factor: float) -> int:
    import torch

    changed = 0
    for name, parameter in model.named_parameters():
        if "layernorm" in name:  # the matrices may have been packed for the CPU's kernels
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(changed))
            parameter.data.mul_(1 + factor * noise.to(parameter.dtype))
            changed += 1
    return changed


def pause(llm: Any, mode: str) -> None:
    """Pause the engine and have it clear its caches, the connector's among them, as before a weight update."""
    llm.llm_engine.engine_core.call_utility("pause_scheduler", mode, True)


def resume(llm: Any) -> None:
    """Go on after a pause."""
    llm.llm_engine.engine_core.call_utility("resume_scheduler")


def sleep_and_wake(llm: Any) -> None:
    """Put the engine to sleep as far as it goes without vLLM's sleep mode, and wake it."""
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])


def scale_weights(llm: Any, factor: float) -> None:
    """Change the weights in memory, on every rank."""
    from functools import partial

    assert all(llm.apply_model(partial(_scale, factor=factor)))


def reset_all(llm: Any) -> bool:
    """Reset the prefix cache with whatever runs, and the connector's."""
    return bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
