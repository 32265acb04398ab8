# SPDX-License-Identifier: Apache-2.0
"""The real manager over a fake engine, fake ranks and an index in RAM, in whatever order Hypothesis
thinks of."""

from __future__ import annotations

import pytest
from machines import run_machine
from support import manager_sizes
from support.manager_parts import Sizes

SIZES = {name: sizes for name, sizes in vars(manager_sizes).items() if isinstance(sizes, Sizes)}
SIZES |= manager_sizes.EVICTION_SIZES


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_invariants_hold(sizes):
    run_machine(sizes, examples=7)


@pytest.mark.torture
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_invariants_hold_for_long(sizes):
    run_machine(sizes, examples=400)
