# SPDX-License-Identifier: Apache-2.0
"""What all tests share: how Hypothesis searches, and what is not run where the manager is compiled."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from kvdisk.manager import IS_COMPILED

# No deadline: two shared cores make no promise. Where every change is tested, the same examples each time, so that a
# change is judged by what it changed; elsewhere new ones, and a failure prints how to repeat it.
settings.register_profile("kvdisk", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true")
settings.load_profile("kvdisk")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is to change the manager where that is compiled, and begin with what takes longest in one file."""
    skip = pytest.mark.skip(reason="changes the manager, which is compiled here: tests/test_interpreted.py runs it")
    for item in items:
        if IS_COMPILED and item.get_closest_marker("interpreted"):
            item.add_marker(skip)
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")
