# SPDX-License-Identifier: Apache-2.0
"""What the documentation says of commands, settings, counters and log lines is what the code
has."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import demo_store
import make_docs
import pytest
from typer.testing import CliRunner

from kvdisk.cli import bench
from kvdisk.cli.main import app
from kvdisk.config import Config
from kvdisk.environment import transfer_of
from kvdisk.stats import METRICS, Miss

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BASE = {"store_dirs": "/nvme/kv", "nvme_bytes": "1GiB", "remote": "s3://bucket/prefix"}
"""What other settings need."""


def prose() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the fenced blocks of a text: what is said behind the fence, and what is in it."""
    yield from re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return what stands between backticks, outside of fenced blocks."""
    without = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", without)]


# --- Made from the code. ---


@pytest.mark.parametrize("path", make_docs.FILES, ids=lambda path: path.name)
def test_what_is_made_from_the_code_is_up_to_date(path):
    assert path.read_text() == make_docs.FILES[path](), "run tools/make_docs.py"


def test_every_setting_and_its_examples():
    for one in make_docs.settings():
        assert one.examples, one.key
        for text in one.examples:
            base = {key: value for key, value in BASE.items() if (one.key, key) != ("max_age_s", "remote")}
            values = base | {one.key: json.loads(text)}
            assert getattr(Config.from_mapping(values), one.key) != getattr(Config(), one.key), (
                "an example changes something"
            )


def test_every_command_shows_what_it_prints_and_its_exit_codes():
    for section in re.split(r"^## kvdisk ", (DOCS / "CLI.md").read_text(), flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0]
        assert f"\n$ kvdisk {name} " in section, "no output: run tools/make_pictures.py"
        assert re.search(r"^\| exit code \| \|\n\|---\|---\|\n\| 0 \| ", section, re.MULTILINE), name


@pytest.mark.parametrize("path", sorted((DOCS / "output").glob("*.txt")), ids=lambda path: path.stem)
def test_what_a_command_prints_by_default_fits_a_terminal(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


# --- Commands. ---


def typed(text: str) -> Iterator[str]:
    """Yield the calls of ``kvdisk`` in a text: lines of blocks, and spans that are one."""
    names = {name for name, _ in make_docs.commands()}
    for said, block in blocks(text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            call = re.fullmatch(r"(?:\$ )?kvdisk (\S.*)", line)
            if call and (said == "sh" or line.startswith("$ ") or call[1].split()[0] in names):
                yield call[1]
    for span in spans(text):
        if span.startswith("kvdisk ") and not is_logged(span):
            yield span.removeprefix("kvdisk ")


def wrong_with(call: str) -> str:
    """Return what is wrong with the arguments of a call of ``kvdisk``, or nothing."""
    words = shlex.split(call, comments=True)
    if words[:1] == ["COMMAND"] or words[0].startswith("-"):
        known = {"--help", "--version", "--install-completion", "--show-completion"}
        return "" if set(words) - {"COMMAND"} <= known else f"no option {words}"
    command = dict(make_docs.commands()).get(words[0])
    if command is None:
        return f"no command {words[0]}"
    arguments = [word for word in words[1:] if word != "[OPTIONS]"]
    options = [option for one in command.params for option in one.opts]
    if not [word for word in arguments if not word.startswith("-")]:
        return ", ".join(f"no option {word}" for word in arguments if word not in options)  # speaks of the command
    try:
        command.make_context(words[0], arguments)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


@pytest.mark.parametrize("path", prose(), ids=lambda path: path.name)
def test_calls_of_the_command_are_right(path):
    assert not [f"kvdisk {call}: {wrong}" for call in typed(path.read_text()) if (wrong := wrong_with(call))]


def test_targets_of_make_and_tools_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in prose():
        text = path.read_text()
        said = [line for _, block in blocks(text) for line in block.splitlines()] + spans(text)
        named = {found[1] for line in said if (found := re.match(r"(?:\$ )?make ([a-z-]+)", line))}
        assert named <= targets, path.name
        assert not [name for name in re.findall(r"\btools/\w+\.py", text) if not (ROOT / name).exists()], path.name


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Path]:
    """The store that the outputs of the pages are of, owned by nobody."""
    with demo_store.demo_store(tmp_path_factory.mktemp("store") / "kv", owned=False, payload_bytes=4096) as path:
        yield path


def runnable() -> list[str]:
    """Return the calls of the first pages that need nothing but a store."""
    found = [call for name in ("QUICKSTART.md", "NO_HITS.md", "index.md") for call in typed((DOCS / name).read_text())]
    return sorted({call.partition(" #")[0].strip() for call in found if " /nvme/kv" in call})


def test_the_calls_of_the_quick_start_run(store, monkeypatch):
    monkeypatch.chdir(store.parent)
    calls = runnable()
    assert {"inspect /nvme/kv", "top /nvme/kv", "why /nvme/kv --tokens tokens.json"} <= set(calls)
    prompt = demo_store.prompt_of(demo_store.branching_block())
    (store.parent / "tokens.json").write_text(json.dumps({"tokens": prompt}))
    for call in calls:
        done = CliRunner().invoke(app, shlex.split(call.replace("/nvme/kv", str(store))))
        assert (done.exit_code, done.stderr) == (0, ""), call
        if call.startswith("why "):
            assert f"Verdict    {len(prompt) - 16:,} of {len(prompt):,} prompt tokens would hit" in done.stdout
        elif call == "inspect /nvme/kv":
            assert headings(done.stdout) == headings((DOCS / "output" / "inspect.txt").read_text())
        else:
            assert done.stdout.strip()


@pytest.fixture
def desk(store, monkeypatch) -> Iterator[Path]:
    """A directory with a copy of the store, and what the commands of docs/output read. Its path is
    short: pytest's own may be so long that a line of output breaks within it."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name).resolve()
        _fill(path, store)
        monkeypatch.setattr(bench, "measure_drive", lambda *_: (1.4e9, 1.4e9, 3.8e9))
        with contextlib.chdir(path):
            yield path


def _fill(path: Path, store: Path) -> None:
    shutil.copytree(store, path / "kv")
    (path / "prompt.json").write_text(json.dumps(demo_store.prompt_of(demo_store.branching_block()) + [0] * 60))
    (path / "kvdisk.json").write_text(
        json.dumps({"store_dirs": str(path / "kv"), "nvme_bytes": "64Mi", "cpu_bytes": "64Mi"})
    )
    (path / "Llama-3.1-8B").mkdir()
    (path / "Llama-3.1-8B" / "config.json").write_text(json.dumps(demo_store.LLAMA_8B))


def printed(desk: Path, call: str) -> str:
    """Return what a command prints that works on the desk, without the names of places."""
    words = shlex.split(call.replace("/nvme", str(desk)))
    return CliRunner().invoke(app, words).output.replace(str(desk), "/nvme")


def needs_little(path: Path) -> bool:
    """Whether a page's command runs here, and ends: others need a trace, engines or a remote
    store."""
    return path.stem not in {"replay", "top", "web"} and "remote" not in path.read_text().partition("\n")[0]


@pytest.mark.parametrize(
    "path", [path for path in sorted((DOCS / "output").glob("*.txt")) if needs_little(path)], ids=lambda path: path.stem
)
def test_what_the_pages_show_is_what_a_command_prints_now(path, desk, request):
    """In words: figures differ, there an engine runs, and here a long path is folded."""
    if path.stem == "bench":
        request.getfixturevalue("needs_compiler")  # the page shows the kernel's queue
    call, _, shown = path.read_text().partition("\n")
    lacking = words_of(shown) - words_of(printed(desk, call.removeprefix("$ kvdisk ")))
    there = {"GiB", "MiB", "kB", "MB", "GB", "in", "use", "d", "h", "min", "aio", "with", "nvme"}
    assert lacking <= there, "run tools/make_pictures.py"


def words_of(text: str) -> set[str]:
    """Return the words of a text, without ids."""
    return set(re.findall(r"[^\W\d_]+", re.sub(r"\b[0-9a-f]{8,}\b", "", text)))


def headings(shown: str) -> list[str]:
    """Return the first word of each line that is not indented: the page is right about these,
    whatever the numbers."""
    return re.findall(r"^[A-Z][a-z]+\b", shown, re.MULTILINE)


# --- Settings in the text. ---


def configurations(text: str) -> Iterator[dict[str, object]]:
    """Yield what a text would have users put into ``kv_connector_extra_config``."""
    decoder = json.JSONDecoder()
    for said, block in blocks(text):
        if said == "json":
            yield json.loads(block)
        elif said == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Dict):
                    yield ast.literal_eval(node)
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if found := dict(re.findall(r"\b(KVDISK_[A-Z_]+)=(\S+)", line)):
                transfer = transfer_of(found)
                assert transfer is not None
                extra = transfer["kv_connector_extra_config"]
                tiers = extra.get("secondary_tiers")
                yield extra if tiers is None else {key: value for key, value in tiers[0].items() if key != "type"}
        for found in re.finditer(r"--kv-transfer-config '(.*?)'", block, re.DOTALL):
            whole, _ = decoder.raw_decode(found[1])
            extra = whole["kv_connector_extra_config"]
            for tier in extra.get("secondary_tiers", ()):
                assert tier.pop("type") == "kvdisk" and extra["spec_name"] == "TieringOffloadingSpec"
                yield tier
            if "secondary_tiers" not in extra:
                assert whole["kv_connector"] == "KVDiskConnector" and whole["kv_role"] == "kv_both"
                yield extra
        for found in re.finditer(r"--hicache-storage-backend-extra-config '(.*?)'", block, re.DOTALL):
            whole = json.loads(found[1])
            assert (whole["module_path"], whole["class_name"]) == ("kvdisk.sglang", "HiCache")
            yield whole["kvdisk"]
        for found in re.finditer(r"--l2-adapter '(.*?)'", block, re.DOTALL):
            whole = json.loads(found[1])
            assert (whole["module_path"], whole["class_name"]) == ("kvdisk.lmcache", "L2Adapter")
            yield whole["adapter_params"]["kvdisk"]


def test_configurations_in_the_text_are_right():
    found = {path.relative_to(ROOT).as_posix(): list(configurations(path.read_text())) for path in prose()}
    wanted = {
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "QUICKSTART", "CONFIGURATION", "OPERATING", "SGLANG", "LMCACHE")),
    }
    assert wanted <= {name for name, values in found.items() if values}
    for values in found.values():
        for one in values:
            Config.from_mapping(BASE | one)


def test_settings_that_the_text_names_are_there():
    """A span such as `nvme_bytes: 5` or `"store_policy": "spillover"` names a setting and a value
    of it."""
    for path in prose():
        for span in spans(path.read_text()):
            if found := re.fullmatch(r'"?(\w+)"?: (true|false|[\d.]+|".*"|\[.*\])', span):
                key, value = found.groups()
                without = () if key.startswith("remote") else ("remote",)
                base = {name: value for name, value in BASE.items() if name not in without}
                Config.from_mapping(base | {key: json.loads(value)})


# --- Log lines and counters. ---


@cache
def sentences() -> list[list[str]]:
    """Return every text in the code that could be a log line or an error, cut where its values
    are."""
    found = []
    for path in sorted((ROOT / "kvdisk").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                parts = [node.value]
            else:
                continue
            found.append(re.sub(r"%[\d.]*[a-z]", "\0", "".join(map(str, parts))).split("\0"))
    return [pieces for pieces in found if len(" ".join(pieces).split()) >= 3]


@cache
def is_logged(line: str) -> bool:
    """Whether the code can say this. An ellipsis at the end stands for the rest, another one for
    any word."""
    whole = line.removesuffix("…").rstrip()
    said = whole.replace("…", "x")
    for pieces in sentences():
        if pieces[0].rstrip() not in said:
            continue
        least = len(pieces) if whole == line else 1
        for count in range(len(pieces), least - 1, -1):
            words = " ".join(pieces[:count]).split()
            some = ".+".join(re.escape(piece) for piece in [*pieces[: count - 1], pieces[count - 1].rstrip()])
            if len(words) >= 3 and re.search(some if count == len(pieces) else rf"{some}[^ ]*$", said):
                return True
    return False


def test_symptoms_are_what_the_code_says():
    """In the table of symptoms a span of five words or more is a line of the log, or an error."""
    table = (DOCS / "OPERATING.md").read_text().partition("## What to do when")[2]
    said = [span for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for span in spans(row)]
    lines = [span for span in said if len(span.split()) >= 5]
    assert len(lines) > 15
    assert not [line for line in lines if not is_logged(line)]
    quoted = [line for name in ("QUICKSTART.md", "CONFIGURATION.md") for line in quoted_lines(DOCS / name)]
    assert len(quoted) >= 5 and not [line for line in quoted if not is_logged(line)]


def quoted_lines(path: Path) -> list[str]:
    """Return the lines of a page's blocks that are neither commands nor anything with a
    language."""
    said = [block for language, block in blocks(path.read_text()) if not language]
    return [line for block in said for line in block.splitlines() if re.match(r"kvdisk \S+ |\w+ must be ", line)]


def test_metrics_that_the_text_names_are_there():
    text = (DOCS / "OPERATING.md").read_text()
    (section,) = re.findall(r"^## Monitoring\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    named = {span for span in spans(section) if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)}
    assert len(named) > 10 and named <= set(METRICS), named - set(METRICS)


# --- Pages that decide. ---


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a text's tables, heads left out."""
    lines = re.findall(r"^\| (.*) ?\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def test_the_tree_of_misses_has_every_reason_and_each_branch_says_what_to_do():
    text = (DOCS / "NO_HITS.md").read_text()
    told = {cells[0]: cells for cells in rows(text) if len(cells) == 3}
    assert all(told[f"`{miss}`: {miss.words}"][2] for miss in Miss)
    bullets = re.findall(r"^- \*\*(.*?)(?=^- |^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(bullets) >= 11 and not [bullet for bullet in bullets if "*Do:*" not in bullet]
    named = {word for span in spans(text) for word in re.findall(r"^\w+$", span)}
    metrics = {"misses", "lookup_tokens", "evicted_unwritten", "write_pauses", "io_errors", "deadline_misses"}
    assert metrics <= named and metrics <= set(METRICS)


def test_the_tree_of_misses_quotes_what_the_code_says():
    text = (DOCS / "NO_HITS.md").read_text()
    said = [span for span in spans(text) if len(span.split()) >= 5 and not span.startswith("kvdisk bench")]
    assert len(said) >= 11 and not [line for line in said if not is_logged(line)]


def test_words_of_the_code_are_in_the_code():
    """What was renamed leaves the glossary."""
    table = (DOCS / "GLOSSARY.md").read_text().partition("## Words of the code")[2]
    words = [word for cells in rows(table)[1:] for word in cells[0].split(", ")]
    assert len(words) > 15
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kvdisk").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {getattr(node, field) for node in nodes for field in ("id", "attr", "name", "arg") if hasattr(node, field)}
    names = "\n".join(name.lower() for name in named if name)
    assert not [word for word in words if not re.search(rf"(?:^|_){word.replace(' ', '_')}", names, re.MULTILINE)]


def test_settings_of_others_are_theirs_and_ours_are_ours():
    text = (DOCS / "BESIDE.md").read_text()
    offloading, lmcache = text.partition("## Settings of the Off")[2].split("## Settings of LMCache")
    for table in (offloading, lmcache.partition("## ")[0]):
        found = rows(table)[1:]
        ours = {name for cells in found for name in re.findall(r"`(\w+)`", cells[1])}
        assert len(found) > 8 and len(ours) > 4 and ours <= set(Config.__dataclass_fields__), ours
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    vllm = Path(spec.submodule_search_locations[0])
    sources = [*(vllm / "v1/kv_offload").rglob("*.py"), vllm / "config/cache.py"]
    sources += (vllm / "distributed/kv_transfer/kv_connector/v1/offloading").glob("*.py")
    known = "\n".join(path.read_text() for path in sources)
    theirs = {name for cells in rows(offloading)[1:] for name in re.findall(r"`(\w+)`", cells[0])}
    assert len(theirs) > 9 and not [name for name in theirs if not re.search(rf"\b{name}\b", known)]
    named = re.findall(r"`([\w/]+\.py)`", text.partition("## When not")[0])
    of_vllm = [name for name in named if name.startswith("tiering/") or name == "file_mapper.py"]
    assert len(of_vllm) >= 4 and not [name for name in of_vllm if not (vllm / "v1/kv_offload" / name).exists()]
