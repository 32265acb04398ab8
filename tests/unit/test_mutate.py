# SPDX-License-Identifier: Apache-2.0
"""Which tests ``make mutate`` runs for a module; mutmut itself runs by hand."""

from __future__ import annotations

from pathlib import Path

import mutate


def test_it_runs_the_unit_tests_that_name_something_of_a_module():
    assert "tests/unit/test_cap.py" in (found := mutate.find_tests([Path("kvdisk/device/cap.py")]))
    assert mutate.STATEFUL not in found and "tests/unit/test_reuse.py" not in found


def test_for_the_manager_it_runs_the_state_machine_too():
    found = mutate.find_tests([Path("kvdisk/manager/pool.py"), Path("kvdisk/device/cap.py")])
    assert {"tests/unit/test_pool.py", "tests/unit/test_cap.py", mutate.STATEFUL} <= set(found)
    assert all((mutate.ROOT / path).is_file() for path in found)
