# SPDX-License-Identifier: Apache-2.0
"""What some tests need of the machine, and what is said where it is missing.

Such a test is skipped with the sentence that kvdisk itself says of it. Where ``NEED_ALL`` is set,
as on the machines that test every change, it fails instead. A pytest plugin: the end of a run lists
what was skipped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdisk.device import aio
from kvdisk.errors import ConfigError
from kvdisk.remote.mooncake import MooncakeBucket

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

NEED_ALL = "KVDISK_TESTS_NEED_ALL"
LIBRARY = Path(aio.__file__).with_name("drive_queue.abi3.so")


def need(why: str | None) -> None:
    """Go on where nothing is missing; else skip the test, or fail it where ``NEED_ALL`` is set."""
    if why is not None:
        (pytest.fail if os.environ.get(NEED_ALL) else pytest.skip)(why)


def why_not_compiled() -> str | None:
    """Return why there is no library of ``drive_queue.c``, if there is none: as a rule, there was
    no compiler. One that cannot be used is a fault of the checkout."""
    return None if LIBRARY.exists() else _failure(aio.library)


def why_no_queue() -> str | None:
    """Return why the kernel's queue cannot be used: there is no library, or the kernel or a
    container refuses it."""
    why = why_not_compiled()
    if why is None and aio.library():
        why = _failure(lambda: aio.KernelQueue("kvdisk-try", lambda _outcome: None).close())
    return why


def _failure(act: Callable[[], object]) -> str | None:
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return None


def why_no_mooncake() -> str | None:
    """Return why Mooncake's client cannot be used, if it lacks something."""
    try:
        MooncakeBucket("mooncake://127.0.0.1:9", {}, deadline_s=1.0).close()  # nothing is asked
    except ConfigError as error:
        return str(error)
    return None


def skipped_line(reasons: Counter[str]) -> str:
    """Return the line that lists what was skipped, by reason; the commonest first."""
    listed = "; ".join(f"{times}: {why}" for why, times in reasons.most_common())
    count = reasons.total()
    return f"kvdisk: skipped {count} {'test' if count == 1 else 'tests'}. {listed}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter) -> Generator[None]:
    """List what was skipped, after all else; only pytest's own last line follows."""
    yield
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[why.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.write_line(skipped_line(reasons))
