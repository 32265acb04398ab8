# SPDX-License-Identifier: Apache-2.0
"""Which device a worker moves bytes with: the one that is configured, or the one that a probe of the drive chose."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvdisk.device.base import Device
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import MAKERS, probe
from kvdisk.errors import ConfigError

logger = logging.getLogger("kvdisk")


def choose_device(wanted: str, directories: Sequence[Path], block_bytes: int) -> Device:
    """Return a new device, which is the caller's to close.

    ``wanted``: one of ``config.DEVICES``. ``auto`` probes the first directory, for slots of ``block_bytes``, and logs
    one line. Without directories nothing is probed, and nothing will move. Raises ConfigError where a device that was
    named cannot be had.
    """
    if not directories:
        return PosixDevice()
    if wanted == "auto":
        report = probe(directories[0], block_bytes)
        logger.info("%s", report.line)
        return MAKERS[report.chosen]()
    if wanted not in MAKERS:
        raise ConfigError(f"device {wanted!r} is not part of this kvdisk; use 'auto', 'nixl' or 'posix'.")
    return MAKERS[wanted]()
