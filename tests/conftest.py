# SPDX-License-Identifier: Apache-2.0
"""What all tests share: how Hypothesis searches."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: two shared cores make no promise. Where every change is tested, the same examples
# each time, so that a change is judged by what it changed; elsewhere new ones, and a failure prints
# how to repeat it.
settings.register_profile("kvdisk", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true")
settings.load_profile("kvdisk")
