# SPDX-License-Identifier: Apache-2.0
"""What only our own tests and measurements run: fake and live engines, ranks, the simulation, the
state machine."""

from __future__ import annotations

import os
from pathlib import Path

PYTHONPATH = {"PYTHONPATH": str(Path(__file__).parents[1])}
"""What a process that runs one of these modules needs in its environment."""
ENVIRONMENT = os.environ | PYTHONPATH
