# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests: Chromium without a window, which Playwright drives. Playwright lies in
a folder of its own."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.laid import ROOT, lay

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REQUIREMENTS = ROOT / "requirements" / "browser.txt"


def why_no_browser() -> str | None:
    """Return why there is no browser, if there is none."""
    return None if _browser() else f"none of {', '.join(BROWSERS)} is installed"


def _browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def lay_playwright() -> Path:
    """Return the folder with Playwright and axe, which checks whether all can use a page."""
    mark = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]
    return lay(f"browser-{mark}", ["-r", str(REQUIREMENTS)], "Playwright")


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """Yield Playwright's ``Browser``. It reaches what is on this machine alone."""
    folder = str(lay_playwright())
    if folder not in sys.path:
        sys.path.append(folder)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=_browser(), args=["--no-sandbox", "--disable-gpu", *options]
        )
        try:
            yield browser
        finally:
            browser.close()


def wrong_for_some(page: Any) -> Sequence[str]:
    """Return what axe finds on a page that some people could not use: a rule, and where."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(
        page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    )
    return [
        f"{one['id']}: {node['target']} {node['any']}" for one in found.response["violations"] for node in one["nodes"]
    ]
