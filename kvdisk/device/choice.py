# SPDX-License-Identifier: Apache-2.0
"""Which device a worker moves bytes with: the one that is configured, or the one that a probe of the drive chose."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvdisk.device.base import Device
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import MAKERS, probe

logger = logging.getLogger("kvdisk")


def choose_device(wanted: str, directories: Sequence[Path], block_bytes: int) -> Device:
    """Return a new device, which is the caller's to close.

    ``wanted``: one of ``config.DEVICES``. ``auto`` probes the first directory, for slots of ``block_bytes``, and logs
    one line, and so does ``gds``, whose GPU memory is another device's: what goes through host memory needs one, too.
    Without directories nothing is probed, and nothing will move. Raises ConfigError where a device that was
    named cannot be had.
    """
    if not directories:
        return PosixDevice()
    if wanted in {"auto", "gds"}:
        report = probe(directories[0], block_bytes)
        logger.info("%s", report.line)
        return MAKERS[report.chosen]()
    return MAKERS[wanted]()


def make_like(device: Device) -> Device:
    """Return another device of the same kind, which is the caller's to close. Raises ConfigError."""
    return type(device)()
