# SPDX-License-Identifier: Apache-2.0
"""``kvdisk web`` over HTTP: it says what ``top``, ``report`` and ``why`` say, to its own page only,
and goes on whatever becomes of the store. In a browser: ``test_web_browser``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli_stores import COMMAND, HYBRID, PLAIN, json_of, leave_home, refused, run_here
from mass_stores import Layer
from support.waits import until
from test_cli_report import Page
from test_cli_top import MIB, T0, Engines, figures
from test_cli_why import PROMPT, described, put
from web_client import Web, serving

from kvdisk.child import ChildProcess, Ended
from kvdisk.cli.frames import DEPARTURES
from kvdisk.cli.web import command, questions, server, watch
from kvdisk.cli.web.guard import Guard, Headers
from kvdisk.cli.web.page import document
from kvdisk.cli.web.watch import PATIENCE_S, Watcher
from kvdisk.device.telemetry_file import FIGURES_FILE, write_telemetry
from kvdisk.stats import METRICS

TOKEN = "correct-horse-battery"  # noqa: S105
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J"


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "store")
    yield made
    for home in made.held:
        home.close(clean=True)


@pytest.fixture
def web(engines: Engines) -> Iterator[Web]:
    """The page of a store with one engine, whose clock the test has."""
    write_telemetry(engines.start(), figures(T0, 100))
    with serving([engines.path], clock=lambda: engines.now) as found:
        yield found


def state_of(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file of a store, with its content and when it was written."""
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"") for file in path.rglob("*")
    }


# -- figures ---------------------------------------------------------------------------------------


def test_the_page_is_told_what_top_says(web, engines):
    engines.now += 1
    told = web.figures()["frame"]
    shown = json_of("top", engines.path, "--interval", "0.2")
    assert told["totals"] == shown["totals"] | {
        name: told["totals"][name] for name in told["totals"] if "per_s" in name
    }
    assert [one["pid"] for one in told["engines"]] == [4321] and told["engines"][0].keys() == shown["engines"][0].keys()


def test_what_leaves_is_counted_by_reason_and_told_as_a_rate(web, engines):
    totals = {
        "evicted_blocks": {"cpu": 900, "nvme": 40},
        "share_evicted_blocks": {"cpu": 30},
        "evicted_unwritten": {"room": 20, "reuse": 0},
        "refused_blocks": {"budget": 7},
        "expired_blocks": {"nvme": 3},
    }
    home = engines.held[0].path
    web.figures()
    write_telemetry(home, figures(T0 + 10, 100, totals=totals))
    engines.now += 10
    told = web.figures()
    wanted = {"evicted_blocks.cpu": 900, "evicted_blocks.nvme": 40, "share_evicted_blocks.cpu": 30}
    wanted |= {"evicted_unwritten.room": 20, "expired_blocks.nvme": 3, "refused_blocks.budget": 7}
    assert told["frame"]["totals"]["departures"] == wanted
    assert told["departed_per_s"]["evicted_blocks.cpu"] == 80.0, "100 had left before the first look"
    counts = {name for name in METRICS if re.search("evicted|expired|refused", name)}
    assert counts == {series.partition(".")[0] for series in DEPARTURES}, "each that counts what leaves has words"


def test_a_chart_has_what_happened_between_two_looks(web, engines):
    home = engines.held[0].path
    for at in range(1, 4):
        web.figures()
        engines.now += 10
        write_telemetry(home, figures(T0 + 10 * at, 100 + 20 * at))
    found = web.figures()["points"]
    assert [point["number"] for point in found] == [1, 2, 3] and {point["seconds"] for point in found} == {10.0}
    (point,) = web.ask("/figures.json?span=minutes&after=2").json()["points"]
    assert point["bytes_per_s"]["gpu_to_cpu"] == point["bytes_per_s"]["cpu_to_nvme"] == 2 * MIB
    assert (point["hit_rate"]["cpu"], point["hit_rate"]["nvme"], point["hit_rate"]["remote"]) == (0.2, 3 / 8, None)
    assert point["evicted_per_s"]["cpu"] == 2.0 and point["fill"] == {"cpu": 0.75, "nvme": 0.25}
    engines.now += 300
    assert web.figures()["points"][-1]["hit_rate"]["cpu"] is None, "nobody asked for anything"
    day = web.ask("/figures.json?span=day").json()["points"]
    assert len(day) == 1 and day[0]["seconds"] == 330.0
    engines.now += 700
    assert len(web.figures()["points"]) == 0, "what is older than the chart is gone"
    engines.now -= 3000
    web.figures()
    engines.now += 5
    assert [point["seconds"] for point in web.figures()["points"]] == [5.0], "a clock that was put back begins anew"


def test_an_engine_that_starts_anew_takes_nothing_away(web, engines):
    home = engines.held[0].path
    web.figures()
    engines.now += 5
    write_telemetry(home, figures(T0 + 5, 3, pid=9, started_s=T0 + 1))
    assert web.figures()["points"][-1]["bytes_per_s"]["gpu_to_cpu"] == 0
    engines.now += 5
    write_telemetry(home, figures(T0 + 10, 13, pid=9, started_s=T0 + 1))
    assert web.figures()["points"][-1]["bytes_per_s"]["gpu_to_cpu"] == 2 * MIB


def test_the_store_may_be_away_torn_newer_or_none_and_the_page_says_so(engines):
    store, aside = engines.path, engines.path.with_name("aside")
    with serving([store], clock=lambda: engines.now) as web:
        found = web.figures()
        assert (found["frame"], found["problem"]) == (None, f"{store} does not exist.")
        store.mkdir()
        assert "is not a kvdisk store" in web.figures()["problem"], "the directory that a drive is mounted on"
        store.rmdir()
        home = engines.start()
        found = web.figures()
        assert found["problem"] == "" and found["frame"]["engines"][0]["figures_s"] is None
        write_telemetry(home, figures(T0, 7))
        (home / FIGURES_FILE).write_bytes((home / FIGURES_FILE).read_bytes()[:100])
        (told,) = web.figures()["frame"]["problems"]
        assert home.name[:8] in told
        write_telemetry(home, figures(T0, 7))
        assert web.figures()["frame"]["engines"][0]["pid"] == 4321
        store.rename(aside)
        engines.now += 5
        found = web.figures()
        assert found["problem"] == f"{store} does not exist." and found["frame"]["time_s"] == T0, "the last is shown"
        aside.rename(store)
        assert web.figures()["problem"] == ""
        said = (store / "STORE").read_text()
        (store / "STORE").write_text(json.dumps(json.loads(said) | {"format_version": 2}))
        assert "newer kvdisk" in web.figures()["problem"]
        (store / "STORE").write_text("{")
        assert web.figures()["problem"] == "", "its engine stores say the same"
        (store / "STORE").write_text(said)
        assert web.figures()["problem"] == ""


def test_an_error_of_ours_is_said_and_the_next_look_goes_on(web, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(watch.FrameReader, "read", lambda _: 1 / 0)
        assert "An error of kvdisk: ZeroDivisionError" in web.figures()["problem"]
    assert web.figures()["problem"] == ""


def test_a_look_that_does_not_return_is_told_and_holds_up_nobody(web, monkeypatch):
    goes_on, is_there = threading.Event(), threading.Event()
    web.figures()

    def hangs(_reader: Any) -> Any:
        is_there.set()
        goes_on.wait()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(watch.FrameReader, "read", hangs)
    monkeypatch.setattr(watch, "SLOW_S", 0.0)
    looking = threading.Thread(target=web.watcher.look)
    looking.start()
    is_there.wait()
    told = web.ask("/figures.json").json()
    assert "has not answered for" in told["problem"] and told["frame"]["engines"]
    goes_on.set()
    looking.join()
    assert web.ask("/figures.json").json()["problem"] == "Input/output error."


def test_a_look_reads_no_index(web, engines):
    opened: list[str] = []
    is_on = True
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if is_on and event == "open" else None)
    web.figures()
    is_on = False
    parts = {part for path in opened for part in path.removeprefix(str(engines.path)).split("/")}
    assert FIGURES_FILE in parts and not {"index", "data.mdb", "USES", "segments"} & parts


def test_it_looks_seldom_while_nobody_asks_and_where_a_look_takes_long(engines, monkeypatch):
    write_telemetry(engines.start(), figures(T0))
    waited: list[float] = []
    watcher, took_s = Watcher([engines.path], 2.0), [0.0, 0.001]

    class Ended(Exception):
        pass

    def wait(timeout: float) -> bool:
        waited.append(timeout)
        if len(waited) == 1:
            watcher._asked_s -= PATIENCE_S
        elif len(waited) == 2:
            watcher.seen()
            assert watcher._wake.is_set(), "who opens the page does not wait"
            took_s[1] = 0.03
        else:
            raise Ended
        return True

    monkeypatch.setattr(watcher._wake, "wait", wait)
    monkeypatch.setattr(time, "thread_time", lambda: took_s.__setitem__(0, took_s[0] + took_s[1]) or took_s[0])
    with pytest.raises(Ended):
        watcher._run()
    assert waited[:2] == [2.0, watch.REST_S] and waited[2] == pytest.approx(0.03 / watch.MOST_SHARE)
    assert watcher.interval_s == waited[2], "the page asks as often"


# -- questions -------------------------------------------------------------------------------------


def test_a_prompt_is_followed_as_why_does(path, tmp_path):
    layer = Layer(path, described(PLAIN, b"\x01" * 32))
    put(layer, PROMPT[:64])
    layer.leave()
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(PROMPT))
    said = json_of("why", path, "--tokens", tokens)
    with serving([path]) as web:
        found = web.why({"tokens": PROMPT}).json()
        assert found == {name: said[name] for name in found} and found["found"]["hit_tokens"] == 64
        answer = web.why("one two")
        assert (answer.status, answer.text[:33]) == (422, "What was pasted does not hold tok")


def test_the_report_is_the_one_that_report_writes(path, tmp_path):
    leave_home(path, HYBRID, 3, last_use_s=1000)
    with serving([path]) as web:
        answer = web.ask("/report")
        assert answer.status == 200 and "Occupancy" in Page(answer.text).text
        (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        assert hash_of(script) in answer.headers["Content-Security-Policy"]
        shutil.rmtree(path)
        answer = web.ask("/report")
        assert (answer.status, answer.text) == (422, f"{path} does not exist.")


def hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_one_question_at_a_time_and_none_for_ever(web, monkeypatch):
    begun, ends = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, *_: object) -> None:
            self.pipe = self

        def post(self, _: object) -> None:
            begun.set()

        def receive(self, _: float) -> Any:
            ends.wait()
            raise TimeoutError

        def end(self) -> Any:
            return Ended(None)

    monkeypatch.setattr(questions, "ChildProcess", Slow)
    answers = []
    first = threading.Thread(target=lambda: answers.append(web.why(PROMPT)))
    first.start()
    begun.wait()
    busy = web.ask("/report")
    assert busy.status == 503 and busy.headers["Retry-After"] and "Another question" in busy.text
    ends.set()
    first.join()
    assert answers[0].status == 422 and "No answer came within 120 s" in answers[0].text
    assert "still waits for a drive" in web.why(PROMPT).text, "its process could not be ended"


def test_a_process_that_dies_is_an_answer(web, monkeypatch):
    monkeypatch.setattr(questions, "ChildProcess", lambda *_: ChildProcess("no.such.module"))
    assert "has ended: ModuleNotFoundError" in web.why(PROMPT).text


# -- whom it answers -------------------------------------------------------------------------------

LOCAL = ["127.0.0.1:8790", "localhost", "LOCALHOST:1", "[::1]:8790", "127.8.9.1", "kv.example:80"]
FOREIGN = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8790", "10.0.0.7", "", "localhost@evil", "[::1",
    "evil.example:99999", "localhost/x", "2130706433", "0x7f.1", "::1",
]  # fmt: skip


@pytest.mark.parametrize("host", [*LOCAL, *FOREIGN])
def test_only_its_own_names_are_answered(host):
    refusal = Guard(["kv.example"], any_address=False, token=None).refuses(Headers([host]), navigates=True)
    assert (refusal is None) is (host in LOCAL) and (refusal is None or refusal.status == 421)


def test_on_other_addresses_each_address_is_a_name_and_names_are_not():
    guard = Guard(["kv.example"], any_address=True, token=None)
    assert guard.refuses(Headers(["10.0.0.7:8790"]), navigates=True) is None
    assert guard.refuses(Headers(["evil.example"]), navigates=True)
    assert guard.refuses(Headers(["localhost", "evil.example"]), navigates=True)
    assert guard.refuses(Headers([]), navigates=True)


@pytest.mark.parametrize(
    ("said", "navigates", "status"),
    [
        ({"site": "same-origin"}, False, None),
        ({"site": "none", "mode": "navigate"}, True, None),
        ({"site": "cross-site", "mode": "navigate"}, True, None),
        ({"site": "cross-site", "mode": "navigate"}, False, 403),
        ({"site": "cross-site", "mode": "no-cors"}, True, 403),
        ({"site": "same-site", "mode": "cors"}, True, 403),
        ({"origin": "http://localhost:8790"}, False, None),
        ({"origin": "http://localhost:3000"}, False, 403),
        ({"origin": "null"}, False, 403),
        ({"origin": "http://["}, False, 403),
    ],
)
def test_pages_of_others_are_not_answered(said, navigates, status):
    guard = Guard([], any_address=False, token=None)
    refusal = guard.refuses(Headers(["localhost:8790"], **said), navigates=navigates)
    assert (refusal and refusal.status) == status


def test_a_link_of_others_leads_to_the_page_and_begins_no_work(web, monkeypatch):
    monkeypatch.setattr(web.asker, "ask", lambda _: pytest.fail("a question was begun"))
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert web.ask("/", **followed).status == 200
    assert web.ask("/report", **followed).status == web.ask("/figures.json", **followed).status == 403


def basic(password: str, user: str = "me") -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        (basic(TOKEN), True), (f"Bearer {TOKEN}", True), (f"bearer  {TOKEN} ", True), (basic(TOKEN, ""), True),
        ("", False), (TOKEN, False), (basic(TOKEN[:-1]), False), (basic(f"{TOKEN}x"), False), ("Basic ?", False),
        (basic(""), False), ("Bearer ", False), (f"Basic {TOKEN}", False), ("Basic ü", False),
    ],
)  # fmt: skip
def test_the_token_is_the_whole_token(shown, is_right):
    guard = Guard([], any_address=False, token=TOKEN)
    refusal = guard.refuses(Headers(["localhost"], authorization=shown), navigates=True)
    assert (refusal is None) is is_right and (refusal is None or refusal.status == 401)


def test_every_route_asks_for_the_token_and_says_the_policy(engines):
    engines.start()
    with serving([engines.path], token=TOKEN) as web:
        web.asker.ask = lambda _: questions.Answered("{}")  # type: ignore[method-assign]
        for method, path in (
            ("GET", "/"),
            ("GET", "/figures.json"),
            ("GET", "/report"),
            ("POST", "/why"),
            ("GET", "/x"),
        ):
            answer = web.ask(path, method)
            assert (answer.status, answer.headers["WWW-Authenticate"][:5]) == (401, "Basic"), path
            assert web.ask(path, method, Authorization=basic(TOKEN)).status != 401
            assert web.ask(path, method, Host="evil.example", Authorization=basic(TOKEN)).status == 421
            for policy in (
                answer.headers["Content-Security-Policy"],
                web.ask(path, method).headers["Content-Security-Policy"],
            ):
                assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert (
                answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"
            )
            assert not [name for name in answer.headers if name.lower().startswith("access-control")], "no CORS"


def test_nothing_is_written_and_only_two_methods_are_known(web, engines):
    web.figures()
    before = state_of(engines.path)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
        assert web.ask("/", method).status == 501, method
    assert web.ask("/", "POST").status == web.ask("/figures.json", "POST").status == web.ask("/why").status == 404
    for query in ("?span=years", "?after=x", "?after=--1", "?after=%00", f"?after={'9' * 5000}"):
        assert web.ask(f"/figures.json{query}").status == 400
    for path in ("/../etc/passwd", "//etc/passwd", "/page.js", "/%2e%2e/"):
        assert web.ask(path).status == 404
    assert b" 404 " in web.raw(f"GET http://[ HTTP/1.0\r\nHost: localhost:{web.port}\r\n\r\n".encode())
    for at in range(3):
        engines.now += at
        web.figures()
    web.ask("/report")
    web.why(PROMPT)
    assert state_of(engines.path) == before


def test_the_page_runs_its_own_script_only_and_names_nobody(web):
    answer = web.ask("/")
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    for name in ("script", "style"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", answer.text, re.DOTALL)
        assert f"{name}-src 'sha256-{hash_of(text)}'" in policy
    assert "unsafe" not in policy and "*" not in policy
    without = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|<[^>]*\son\w+=|innerHTML|insertAdjacentHTML|document\.write|eval\(", without)
    assert len(answer.text) < 100_000 and "<!-- " not in answer.text, "all parts are in it"
    words = json.loads(re.findall(r'id="words">(.*?)</script>', answer.text, re.DOTALL)[0])
    assert words["misses"]["never_seen"] == "never seen or forgotten" and words["tiers"]["nvme"] == "NVMe"
    assert re.findall(r'for="(\w+)"', answer.text) == ["tokens", "namespace", "salt"]
    assert document().body == answer.text.encode()


def test_names_from_the_store_are_only_text(web, engines):
    write_telemetry(engines.held[0].path, figures(T0, 5, model=HOSTILE, host=HOSTILE))
    answer = web.ask("/figures.json")
    web.watcher.look()
    answer = web.ask("/figures.json")
    assert (
        answer.headers["Content-Type"] == "application/json"
        and answer.json()["frame"]["engines"][0]["model"] == HOSTILE
    )


# -- bounds ----------------------------------------------------------------------------------------


def test_a_request_is_bounded_in_bytes(web):
    host = f"Host: localhost:{web.port}\r\n".encode()
    assert web.raw(b"GET / HTTP/1.1\r\n" + host + b"X: " + b"x" * (40 << 10) + b"\r\n\r\n") == b""
    assert web.raw(b"\x16\x03\x01\x02\x00\x01\x00" * 20 + b"\r\n\r\n"), "TLS is answered with an error"
    for length, status in (("17000000", 413), ("9" * 5000, 413), ("-1", 411), ("x", 411), ("", 411)):
        answer = web.ask("/why", "POST", None, Content_Type="application/json", Content_Length=length)
        assert answer.status == status, length
    chunked = {"Content_Type": "application/json", "Content_Length": "5", "Transfer_Encoding": "chunked"}
    assert web.ask("/why", "POST", None, **chunked).status == 411
    assert web.why(PROMPT, Content_Type="text/plain").status == 415
    for body in ("", "[]", "{", '{"tokens": 5}', "[" * 50_000, '{"tokens": "1", "salt": null}'):
        assert web.ask("/why", "POST", body, Content_Type="application/json").status == 400, body
    assert web.ask("/").status == 200


def test_a_request_that_comes_slowly_is_given_up(web, monkeypatch):
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    monkeypatch.setattr(server, "BODY_S", 0.3)
    with socket.create_connection(("127.0.0.1", web.port), timeout=60) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.05):
                try:
                    slow.sendall(b"X: y\r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        with suppress(ConnectionError):
            assert slow.recv(100) == b""
        ended.set()
        dripping.join()
    head = f"POST /why HTTP/1.1\r\nHost: localhost:{web.port}\r\nContent-Type: application/json\r\n"
    assert web.raw(f"{head}Content-Length: 9\r\n\r\n{{".encode()) == b""


def test_more_requests_than_it_answers_at_a_time_are_refused_at_once(web, monkeypatch):
    held = [socket.create_connection(("127.0.0.1", web.port), timeout=60) for _ in range(server.MOST_REQUESTS)]
    try:
        until(lambda: web.server._free._value == 0)
        with socket.create_connection(("127.0.0.1", web.port), timeout=60) as further:
            assert further.recv(1000).startswith(b"HTTP/1.0 503 ")
    finally:
        for one in held:
            one.close()
    until(lambda: web.server._free._value == server.MOST_REQUESTS)
    assert web.ask("/").status == 200


# -- the command -----------------------------------------------------------------------------------


def test_no_other_command_imports_the_server():
    code = (
        "import sys; from kvdisk.cli import main\n"
        "assert not any('cli.web' in each for each in sys.modules)\n"
        "for name in main.MODULES: main.Commands().get_command(None, name)\n"
        "print([m for m in sys.modules if m == 'socketserver' or 'cli.web.' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvdisk.cli.web.command']"


def started(*arguments: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    words = [str(COMMAND), "web", *map(str, arguments), "--port", "0", "--json"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = ""
    while not said.endswith("}\n"):
        line = child.stdout.readline()
        assert line, child.communicate()
        said += line
    return child, json.loads(said)


def test_the_command_serves_until_it_is_told_to_end(engines, tmp_path):
    write_telemetry(engines.start(), figures(time.time(), 5))
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    child, said = started(engines.path, "--token-file", token, "--interval", "0.2")
    try:
        port = int(said["url"].rpartition(":")[2].strip("/"))
        assert said == {"json_version": 1, "url": f"http://127.0.0.1:{port}/", "token": None}
        asked = Web.__new__(Web)
        asked.port = port
        assert asked.ask("/figures.json").status == 401
        until(lambda: asked.ask("/figures.json", Authorization=basic(TOKEN)).json()["frame"] is not None)
        assert "cannot be listened on (Address already in use)" in refused("web", engines.path, "--port", port)
    finally:
        child.send_signal(signal.SIGTERM)
        _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (0, "")


def test_elsewhere_than_on_loopback_it_makes_a_token(tmp_path, monkeypatch):
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.WebServer, "serve_forever", end)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    said = json_of("web", tmp_path / "not there yet", "--host", "0.0.0.0", "--port", 0)  # noqa: S104
    assert len(said["token"]) >= 32 and said["url"].startswith("http://0.0.0.0:")
    assert json_of("web", tmp_path, "--port", 0)["token"] is None


def test_what_the_command_refuses(tmp_path):
    short = tmp_path / "token"
    short.write_text("short")
    assert "does not hold a token: 16 letters" in refused("web", tmp_path, "--token-file", short)
    assert "cannot be read" in refused("web", tmp_path, "--token-file", tmp_path / "none")
    assert "is no address of this machine" in refused("web", tmp_path, "--host", "no such host")
    assert "cannot be listened on" in refused("web", tmp_path, "--host", "192.0.2.1")
    assert run_here("web").exit_code == 2
