# SPDX-License-Identifier: Apache-2.0
"""Warnings that others' words are in."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from kvdisk.errors import EngineLog, QuietLog


def test_what_others_have_written_forges_no_line(caplog):
    quiet = QuietLog(lambda: 0.0, logging.getLogger("kvdisk"))
    quiet.warn("adapter", "requests with the adapter a\r\nERROR forged\x1b[2J\u2028 are left alone")
    assert caplog.messages == [
        "kvdisk: requests with the adapter a\ufffd\ufffdERROR forged\ufffd[2J\ufffd are left alone"
    ]


def test_an_error_of_many_threads_is_traced_once_for_each_kind(caplog):
    engine_log = EngineLog("SGLang", logging.getLogger("kvdisk"))
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda at: engine_log.error("batch_get", (OSError if at % 2 else KeyError)("gone")), range(200))
        )
    engine_log.error("batch_set", OSError("gone"))
    traced = [record for record in caplog.records if record.exc_info]
    assert sorted(type(record.exc_info[1]).__name__ for record in traced) == ["KeyError", "OSError", "OSError"]
    assert {record.getMessage() for record in traced} == {
        "kvdisk's batch_get failed, and SGLang goes on without it",
        "kvdisk's batch_set failed, and SGLang goes on without it",
    }
    said = sorted(record.getMessage() for record in caplog.records if not record.exc_info)
    assert said == [
        "kvdisk: batch_get failed, and SGLang goes on without it: 'gone'",
        "kvdisk: batch_get failed, and SGLang goes on without it: gone",
    ]
