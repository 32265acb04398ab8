# SPDX-License-Identifier: Apache-2.0
"""The page of ``kvdisk web`` in a real browser: it shows what the store has, in both looks and all
widths, to all users, by keyboard, and to nobody's page but its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_stores import PLAIN
from mass_stores import Layer
from support import ENVIRONMENT
from support.browser import chromium, why_no_browser, wrong_for_some
from support.needs import need
from support.waits import until
from test_cli_top import T0, Engines, figures
from test_cli_why import PROMPT, put
from web_client import Web, serving

from kvdisk.cli import output
from kvdisk.device.telemetry_file import FIGURES_FILE, write_telemetry
from kvdisk.stats import Miss

pytestmark = pytest.mark.torture
HOSTILE = "<img src=x onerror=\"document.title='won'\"><script>document.title='won'</script>"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
SOON_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    need(why_no_browser())
    with chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as found:
        yield found


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """A store with a prompt on it, and one engine at work."""
    made = Engines(tmp_path / "store")
    layer = Layer(made.path, PLAIN)
    put(layer, PROMPT[:64])
    layer.leave()
    totals = figures(T0, 100)["totals"] | {"evicted_unwritten": {"room": 12}, "failed_loads": 0}
    write_telemetry(made.start(), figures(T0, 100, totals=totals))
    yield made
    for home in made.held:
        home.close(clean=True)


@pytest.fixture
def web(engines: Engines) -> Iterator[Web]:
    with serving([engines.path], watch=True, clock=lambda: engines.now) as found:
        yield found


@pytest.fixture
def opened(browser: Any, web: Web) -> Iterator[Any]:
    """The page, once it is live. Fails where anything is asked of others, or the console has an
    error."""
    with_page = browser.new_context(viewport=WIDE)
    page, wrong = with_page.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((web.url, "data:")) else wrong.append(asked.url))
    page.goto(web.url)
    page.get_by_text("Live", exact=True).wait_for(timeout=SOON_MS)
    yield page
    with_page.close()
    assert not wrong


def work(engines: Engines, looks: int = 4) -> None:
    """Let the engine go on for some looks."""
    for _ in range(looks):
        engines.now += 2
        moved = int(engines.now - T0) * 10
        totals = figures(0, moved)["totals"] | {"evicted_unwritten": {"room": moved}}
        write_telemetry(engines.held[0].path, figures(engines.now, 100 + moved, totals=totals))
        threading.Event().wait(0.5)


def said(page: Any) -> str:
    return str(page.locator("main").inner_text())


def test_it_says_what_the_text_says(opened, engines, web):
    work(engines)
    opened.locator("#misses tbody tr").first.wait_for()
    engines.now += 60  # nothing changes from here on
    opened.get_by_text("○ idle").wait_for(timeout=SOON_MS)
    frame = web.watcher.seen().frame
    text, totals = said(opened), frame.totals
    assert opened.locator("h1").inner_text() == f"kvdisk {engines.path}"
    for words in (
        output.share(totals.hit_rate),
        f"of {output.number(totals.lookup_tokens)} asked for",
        f"~{output.duration(totals.saved_seconds)}",
        *(
            f"{output.size(used)} of {output.size(totals.capacity_bytes[tier])}"
            for tier, used in totals.used_bytes.items()
        ),
        *(f"{miss.words}" for miss in totals.misses),
        "evicted from CPU",
        "of CPU's, and not on NVMe: no room, or the drive was behind",
        "/nvme/one",
        engines.held[0].id[:8],
        output.size(frame.drives[0].written_bytes),
    ):
        assert words in text, words
    assert Miss.SHORT.words not in text, "of these there were none"


def test_its_numbers_are_in_the_words_of_the_commands(opened):
    values = [0, 1, 9, 999, 1000, 1023, 1024, 1536, 99_940_000, 812_400_000, 999_949, 123_456_789_012, 5 * 1024**5]
    cases = {
        "size": (values, output.size),
        "number": (values, output.number),
        "speed": ([0, 0.4, 1, 999, 12_345, 999_949, 812_400_000, 999_700_000, 1.85e9, 123e9], output.speed),
        "share": ([0, 1e-9, 0.004, 0.01, 0.334, 0.61, 0.99, 0.999, 1], output.share),
        "duration": ([0, 59, 60, 61, 3599, 3600, 3661, 86_399, 86_400, 90_061, 3e7, 4e7], output.duration),
    }
    for name, (given, expected) in cases.items():
        found = opened.evaluate(f"values => values.map(value => say.{name}(value))", given)
        assert found == [expected(value) for value in given], name
        if name != "duration":
            assert opened.evaluate(f"() => say.{name}(null)") == "?"
    names = ["a/b", "/models/of/a/b", "", "/a", "c"]
    assert opened.evaluate("names => names.map(say.model)", names) == [output.short_model(name) for name in names]


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_all_can_use_it_in_each_look_and_width(opened, engines, web, look, size):
    opened.set_viewport_size(size)
    opened.emulate_media(color_scheme=look)
    (engines.start() / FIGURES_FILE).write_text("{")
    engines.start()
    work(engines)
    opened.locator("#tokens").fill(json.dumps(PROMPT))
    opened.get_by_role("button", name="Follow the prompt").click()
    opened.get_by_text("64 of 100 prompt tokens would hit").wait_for(timeout=SOON_MS)
    opened.get_by_text("✗ figures unreadable").wait_for(timeout=SOON_MS)
    assert opened.locator(".details:visible").count() == 0
    for button in opened.locator(".opens").all():
        button.click()
    assert wrong_for_some(opened) == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= size["width"], "nothing is wider than the screen"
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(ground.strip("rgb()").split(",")[0]) < 60) is (look == "dark")


def test_it_works_by_keyboard_alone(opened, engines):
    work(engines)
    press, focused = (
        opened.keyboard.press,
        lambda: opened.evaluate("document.activeElement.id || document.activeElement.className"),
    )
    press("Tab")
    assert focused() == "skip" and opened.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    press("Enter")
    press("Tab")
    assert opened.evaluate("document.activeElement.value") == "minutes"
    press("ArrowRight")
    assert opened.evaluate("state.span") == "day"
    press("ArrowLeft")
    until(lambda: opened.evaluate("state.span === 'minutes' && state.points.length > 2"))
    press("Tab")
    assert focused() == "plot"
    told = []
    for key in ("End", "ArrowLeft", "Home"):
        press(key)
        told.append(opened.evaluate("document.activeElement.getAttribute('aria-valuetext')"))
    second = told[-1]
    assert len(set(told)) == 3 and all("CPU " in one and "NVMe " in one for one in told)
    assert opened.locator(".moment").first.inner_text() == f"at {second.partition(': ')[0]}"
    while focused() != "opens":
        press("Tab")
    press("Enter")
    opened.get_by_text("pid 4321 on there, 2 ranks").wait_for(timeout=SOON_MS)
    work(engines, 2)
    assert focused() == "opens", "what is new takes the place from nobody"
    while focused() != "tokens":
        press("Tab")
    opened.keyboard.type(" ".join(map(str, PROMPT)))
    press("Tab")
    press("Tab")
    opened.keyboard.type("a salt")
    press("Tab")
    press("Enter")
    opened.get_by_text("0 of 100 prompt tokens would hit").wait_for(timeout=SOON_MS)
    assert opened.evaluate("document.activeElement.type") == "submit"
    press("Shift+Tab")
    press("Control+A")
    press("Delete")
    press("Enter")
    opened.get_by_text("64 of 100 prompt tokens would hit").wait_for(timeout=SOON_MS)
    label = opened.locator("#answer [role=img]").get_attribute("aria-label")
    assert label == (
        "tokens 0 to 64 would hit; tokens 64 to 96 not stored; tokens 96 to 100 beyond the last whole block"
    )
    press("Tab")
    press("Tab")
    assert opened.evaluate("document.activeElement.getAttribute('href')") == "report"
    with opened.context.expect_page() as report:
        press("Enter")
    report.value.get_by_text("Occupancy").wait_for(timeout=SOON_MS)
    report.value.locator(".tree p").nth(1).click()
    assert report.value.locator(".node.gone, .node.whole").count() > 0, "its script runs under the policy"


def test_it_goes_on_whatever_becomes_of_the_store(opened, engines, web):
    home = engines.held[0].path
    (home / FIGURES_FILE).write_text('{"json_version": 1, ')
    opened.get_by_text("✗ figures unreadable").wait_for(timeout=SOON_MS)
    opened.locator("#problems li").get_by_text(home.name[:8]).wait_for(timeout=SOON_MS)
    write_telemetry(home, figures(T0 + 1, 200))
    opened.get_by_text("✗ figures unreadable").wait_for(state="detached", timeout=SOON_MS)
    engines.path.rename(engines.path.with_name("aside"))
    opened.locator("#live", has_text="does not exist.").wait_for(timeout=SOON_MS)
    assert "Shown as of" in opened.locator("#age").inner_text() and home.name[:8] in said(opened)
    engines.path.with_name("aside").rename(engines.path)
    opened.locator("#live", has_text="Live").wait_for(timeout=SOON_MS)
    second = engines.start()
    opened.get_by_text("○ no figures yet").wait_for(timeout=SOON_MS)
    engines.held.pop().close(clean=True)
    opened.locator("#stopped li", has_text=second.name[:8]).wait_for(timeout=SOON_MS)
    assert opened.locator("#engines tbody tr:not(.details)").count() == 1


def test_it_goes_on_when_the_server_comes_back(browser, engines):
    page = browser.new_context().new_page()
    with serving([engines.path], watch=True) as web:
        page.goto(web.url)
        page.locator("#live", has_text="Live").wait_for(timeout=SOON_MS)
        port = web.port
    page.locator("#live", has_text="does not answer").wait_for(timeout=SOON_MS)
    with serving([engines.path], watch=True, port=port):
        page.locator("#live", has_text="Live").wait_for(timeout=SOON_MS)
        until(lambda: page.evaluate("state.points.length > 1"))
    page.context.close()


def test_names_of_a_store_are_only_text(opened, engines):
    write_telemetry(engines.held[0].path, figures(T0 + 1, 5, model=HOSTILE, host=HOSTILE))
    opened.get_by_text("onerror").first.wait_for(timeout=SOON_MS)
    opened.locator(".opens").click()
    opened.get_by_text("ranks").wait_for()
    assert opened.title() == f"kvdisk {engines.path}"
    assert opened.evaluate("document.images.length") == 0 and opened.evaluate("document.scripts.length") == 2


def test_eighty_engines(opened, engines):
    for at in range(79):
        failed = {"failed_loads": 3} if at == 70 else {}
        write_telemetry(engines.start(), figures(T0, at, totals=figures(T0, at)["totals"] | failed, started_s=T0 + at))
    until(lambda: opened.locator("#engines tbody tr:not(.details)").count() == 80)
    assert "3 failed loads" in opened.locator("#engines tbody tr").first.inner_text(), "those that failed come first"
    opened.locator(".opens").nth(40).focus()
    opened.keyboard.press("Enter")
    work(engines, 2)
    assert opened.evaluate("document.activeElement.className") == "opens"
    took_ms = opened.evaluate(
        "() => { const at = performance.now(); show_frame(state.frame, {}); return performance.now() - at; }"
    )
    assert took_ms < 1000, "a look is shown long before the next"


def test_a_real_engine_that_works_and_is_killed(browser, tmp_path):
    store = tmp_path / "store"
    options = ["--seconds", "600", "--seed", "1", "--model", "some/model", "--blocks", "400"]
    command = [sys.executable, "-m", "support.live_process", "--store", str(store), *options]
    page = browser.new_context().new_page()
    with serving([store], watch=True) as web:
        page.goto(web.url)
        page.locator("#live", has_text="does not exist.").wait_for(timeout=SOON_MS)
        engine = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            page.locator("#engines", has_text="✓ fine").wait_for(timeout=SOON_MS)
            until(lambda: page.evaluate("state.points.some(point => point.bytes_per_s.gpu_to_cpu > 0)"))
            until(lambda: page.evaluate("state.points.some(point => point.hit_rate.cpu > 0)"))
            assert "some/model" in said(page) and page.locator("#drives", has_text=str(store)).count() == 1
        finally:
            engine.kill()
            engine.wait()
        page.locator("#stopped li", has_text="some/model, last used").wait_for(timeout=SOON_MS)
        page.get_by_text("None is using this store now.").wait_for(timeout=SOON_MS)
        page.locator("#live", has_text="Live").wait_for(timeout=SOON_MS)
    page.context.close()


class _Foreign(BaseHTTPRequestHandler):
    """A page of somebody else."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>somebody's</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


READ = """async ([url, how]) => {
  try { const answer = await fetch(url, how); return [answer.type, answer.status, await answer.text()]; }
  catch (error) { return [error.name, 0, '']; }
}"""


def test_a_page_of_somebody_else_reads_nothing(browser, web):
    other = HTTPServer(("127.0.0.1", 0), _Foreign)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    page = browser.new_context().new_page()
    asked: list[object] = []
    web.asker.ask = asked.append  # type: ignore[assignment, method-assign]
    try:
        for host in ("localhost", "evil.example"):
            page.goto(f"http://{host}:{other.server_port}/")
            for how in ({}, {"mode": "no-cors"}, {"method": "POST", "mode": "no-cors", "body": "{}"}):
                for path in ("figures.json", "why", "report"):
                    kind, status, text = page.evaluate(READ, [f"{web.url}{path}", how])
                    assert (status, text) == (0, ""), (host, how, path, kind)
            page.evaluate("url => { document.body.innerHTML = `<iframe src=${url}></iframe>` }", web.url)
            page.wait_for_timeout(500)
            assert [frame.url for frame in page.frames[1:]] == ["chrome-error://chromewebdata/"], "nor frames it"
        assert not asked, "no question was even begun"
        # A name of theirs that leads here is theirs, so that their page could read what it answers.
        page.goto(f"http://evil.example:{web.port}/")
        assert "does not answer to this name" in page.content()
        assert page.evaluate(READ, ["/figures.json", {}])[1:] == [0, ""]
    finally:
        page.context.close()
        other.shutdown()
        thread.join()
        other.server_close()


def test_a_browser_shows_the_token_as_a_password(browser, engines):
    with serving([engines.path], watch=True, token="correct-horse-battery") as web:  # noqa: S106
        stranger = browser.new_context().new_page()
        with pytest.raises(Exception, match="INVALID_AUTH_CREDENTIALS"):
            stranger.goto(web.url)
        known = browser.new_context(http_credentials={"username": "me", "password": "correct-horse-battery"})
        page = known.new_page()
        page.goto(web.url)
        page.locator("#live", has_text="Live").wait_for(timeout=SOON_MS)
        stranger.context.close()
        known.close()
