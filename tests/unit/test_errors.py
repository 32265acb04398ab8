# SPDX-License-Identifier: Apache-2.0
"""Warnings that others' words are in."""

from __future__ import annotations

import logging

from kvdisk.errors import QuietLog


def test_what_others_have_written_forges_no_line(caplog):
    quiet = QuietLog(lambda: 0.0, logging.getLogger("kvdisk"))
    quiet.warn("adapter", "requests with the adapter a\r\nERROR forged\x1b[2J\u2028 are left alone")
    assert caplog.messages == [
        "kvdisk: requests with the adapter a\ufffd\ufffdERROR forged\ufffd[2J\ufffd are left alone"
    ]
