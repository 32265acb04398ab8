# SPDX-License-Identifier: Apache-2.0
"""What the assembly refuses at the start, and how it notes the end."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from support.fake_pool import FakePool

from kvdisk.assembly import SchedulerParts, assemble_scheduler
from kvdisk.config import Config
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import Geometry, GroupGeometry

GEOMETRY = Geometry((GroupGeometry(0, 16, 8192),), 2, 16)


def test_memory_for_no_block_is_refused():
    with pytest.raises(ConfigError, match="cpu_bytes 16383 holds no block of each kind"):
        assemble_scheduler(Config(cpu_bytes=16383), GEOMETRY, FakePool(4, print), None, {})


@pytest.mark.parametrize(
    ("flushed", "closed", "clean"),
    [
        (True, None, [True]),
        (False, None, [False]),
        (True, DeviceError(5, "gone"), [False]),
        (True, DeviceError(110, "hanging"), []),
    ],
    ids=["committed", "not committed", "not closed", "hanging"],
)
def test_an_end_is_clean_where_all_was_committed(flushed, closed, clean):
    """Where the file system hangs the home stays this process's until it has ended."""
    index, home = Mock(), Mock()
    index.flush.return_value, index.close.side_effect = flushed, closed
    SchedulerParts(Mock(), index, home, None, None, Mock(), [Mock()]).close()
    assert [call.kwargs["clean"] for call in home.close.call_args_list] == clean
