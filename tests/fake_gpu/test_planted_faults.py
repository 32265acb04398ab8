# SPDX-License-Identifier: Apache-2.0
"""The traffic is tested too: it must see each fault that is planted in the CUDA path, and nothing
where none is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.planting import Planter

from fake_gpu import control
from fake_gpu.planted_faults import FAULTS, REFUSED, see
from fake_gpu.traffic import VARIANTS
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, CudaLanes, Lane, LayerBlocks
from kvdisk.worker.copier_base import Slots
from kvdisk.worker.gpu_staging import GpuStaging

pytestmark = pytest.mark.fake_gpu
FEW = (
    "gathers do not wait for the model",
    "protect does not hold the model",
    "the end of a copy is that of its last lane",
    "stores and loads have the same scratch",
    "straight copies go by the lane beside",
    "a slot is verified when its sums have begun",
)
"""One of each kind, for every day."""
FIRST_REFUSED = "numbers go by another stream than their lane"
CASES = [(name, variant) for name, fault in FAULTS.items() if not fault.harmless for variant in fault.traffic]
_OF_FEW = sorted({FAULTS[name].traffic[0] for name in FEW})
_OF_ALL = sorted({variant for _, variant in CASES} - set(_OF_FEW))


@pytest.mark.parametrize(
    "variant", [*_OF_FEW, *(pytest.param(variant, marks=pytest.mark.torture) for variant in _OF_ALL)]
)
def test_traffic_without_a_fault_is_right(variant: str, tmp_path: Path) -> None:
    """Without kvdisk's own trial, as the faults are run; with it, see ``test_traffic``."""
    seen = see("", VARIANTS[variant], tmp_path, 2)
    assert not seen.by, seen.said


def must_see(name: str, variant: str, directory: Path) -> None:
    seen = see(name, VARIANTS[variant], directory)
    assert seen.reached, "the traffic never comes to the fault"
    assert seen.by, f"{seen.seeds} seeds have not seen it"


@pytest.mark.parametrize("name", FEW)
def test_traffic_sees_a_planted_fault(name: str, tmp_path: Path) -> None:
    must_see(name, FAULTS[name].traffic[0], tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_traffic_sees_each_planted_fault(name: str, variant: str, tmp_path: Path) -> None:
    must_see(name, variant, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.torture] * (name != FIRST_REFUSED))
        for name, fault in FAULTS.items()
        if fault.refused
    ],
)
def test_kvdisk_refuses_to_start_with(name: str, tmp_path: Path) -> None:
    seen = see(name, VARIANTS[FAULTS[name].traffic[0]], tmp_path, tries=True, by=REFUSED)
    assert seen.by, seen.said


@pytest.mark.torture
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name, fault in FAULTS.items() if fault.harmless for variant in fault.traffic],
)
def test_what_is_harmless_is_reached_and_does_no_harm(name: str, variant: str, tmp_path: Path) -> None:
    seen = see(name, VARIANTS[variant], tmp_path, 3, tries=True)
    assert seen.reached, "the traffic never comes to the fault"
    assert not seen.by, seen.said


@pytest.mark.parametrize("name", ["", "lanes do not wait for zeroed scratch"])
def test_a_lane_waits_for_its_zeroed_scratch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that comes before anybody has waited for the model's stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        layers = LayerBlocks([torch.zeros(8, 4096, dtype=torch.uint8, device="cuda")])
        with closing(Arena([2 * 4096], [4], pin=True)) as arena:
            arena.await_pinned()
            lanes = CudaLanes()
            assert raced(name, monkeypatch, lambda: scatter_at_once(layers, lanes, arena)) is bool(name)


@pytest.mark.parametrize("name", ["", "lanes do not wait for staging's zeros"])
def test_a_lane_waits_for_the_zeros_of_staging(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that come before anybody has waited for the model's stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        lanes = CudaLanes()
        assert raced(name, monkeypatch, lambda: sum_at_once(lanes)) is bool(name)


def raced(name: str, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> bool:
    """Do something, with a fault planted if one is named; return whether anything was without an
    order."""
    patch.setattr("kvdisk.worker.gpu_staging._kernel_for", lambda _: None)
    planter = Planter(patch)
    if name:
        FAULTS[name].plant(planter)
    torch.cuda.synchronize()
    control.reseed("eager")  # the bytes are right then, and the missing order shows nevertheless
    races = control.races()
    act()
    torch.cuda.synchronize()
    control.reseed("mixed")
    assert planter.reached or not name
    return control.races() > races


def scatter_at_once(layers: LayerBlocks, lanes: CudaLanes, arena: Arena) -> None:
    copier = CudaCopier([layers], lanes, 0)
    copied = copier.scatter(0, Slots(arena, 0, [0]), [1])
    assert copied is not None
    copied.synchronize()


def sum_at_once(lanes: CudaLanes) -> None:
    staging = GpuStaging([2 * 4096], [4], lanes)
    summed = staging.start_sums(0, [0], 4096, Lane.LOAD)
    assert summed is not None
    summed.synchronize()
    torch.cuda.synchronize()
    staging.close()
