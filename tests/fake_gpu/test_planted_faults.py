# SPDX-License-Identifier: Apache-2.0
"""The traffic is tested too: it must see each fault that is planted in the CUDA path, and nothing
where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_gpu.planted_faults import FAULTS, see
from fake_gpu.traffic import VARIANTS

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
CASES = [(name, variant) for name, fault in FAULTS.items() if not fault.harmless for variant in fault.traffic]
_OF_FEW = sorted({FAULTS[name].traffic[0] for name in FEW})
_OF_ALL = sorted({variant for _, variant in CASES} - set(_OF_FEW))


@pytest.mark.parametrize(
    "variant", [*_OF_FEW, *(pytest.param(variant, marks=pytest.mark.torture) for variant in _OF_ALL)]
)
def test_traffic_without_a_fault_is_right(variant: str, tmp_path: Path) -> None:
    for tries in (True, False):  # without kvdisk's own trial, too: so the faults are run
        seen = see("", VARIANTS[variant], tmp_path, 1, tries=tries)
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


@pytest.mark.torture
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.refused])
def test_kvdisk_refuses_to_start_with(name: str, tmp_path: Path) -> None:
    seen = see(name, VARIANTS[FAULTS[name].traffic[0]], tmp_path, tries=True)
    assert "refused at start" in seen.by, seen.said


@pytest.mark.torture
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name, fault in FAULTS.items() if fault.harmless for variant in fault.traffic],
)
def test_what_is_harmless_is_reached_and_does_no_harm(name: str, variant: str, tmp_path: Path) -> None:
    seen = see(name, VARIANTS[variant], tmp_path, 3, tries=True)
    assert seen.reached, "the traffic never comes to the fault"
    assert not seen.by, seen.said
