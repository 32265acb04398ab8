# SPDX-License-Identifier: Apache-2.0
"""The real manager over a fake engine, fake ranks and an index in RAM, in whatever order Hypothesis thinks of."""

from __future__ import annotations

import pytest
from machines import ALL_SIZES, run_machine

NAMES = ("one group", "window", "reuse on NVMe", "reuse in memory", "NVMe only", "CPU only")


@pytest.mark.parametrize("sizes", ALL_SIZES, ids=NAMES)
def test_the_invariants_hold(sizes):
    run_machine((sizes,), examples=80)


@pytest.mark.torture
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=NAMES)
def test_the_invariants_hold_for_long(sizes):
    run_machine((sizes,), examples=3000, steps=80)
