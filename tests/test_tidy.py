# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check: sizes, names, who imports what, and that the words
match the code."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FUNCTION_LINES = 70
MOST_PARAMETERS = 7

ROOMS: dict[str, tuple[str, ...]] = {
    "vllm": ("kvdisk/connector/",),
    "sglang": ("kvdisk/sglang/",),
    "lmcache": ("kvdisk/lmcache/",),
    "torch": (
        "kvdisk/connector/",
        "kvdisk/sglang/",
        "kvdisk/worker/copier.py",
        "kvdisk/worker/copy_check.py",
        "kvdisk/worker/arena.py",
        "kvdisk/worker/cudart.py",
        "kvdisk/worker/gpu_staging.py",
        "kvdisk/worker/sum_kernel.py",
    ),
    "triton": ("kvdisk/worker/sum_kernel.py",),
    "lmdb": ("kvdisk/index/lmdb_tables.py",),
    "kvikio": ("kvdisk/device/gds.py",),
    "obstore": ("kvdisk/remote/obstore_bucket.py",),
    "blake3": ("kvdisk/remote/client.py",),
    "mooncake": ("kvdisk/remote/mooncake_process.py",),
    "zstandard": ("kvdisk/remote/planes.py",),
    "numpy": ("kvdisk/",),
    "xxhash": ("kvdisk/device/", "kvdisk/worker/", "kvdisk/manager/catalog.py", "kvdisk/connector/weights.py"),
    "rich": ("kvdisk/cli/",),
    "typer": ("kvdisk/cli/",),
    "pyarrow": ("kvdisk/cli/export.py",),
    "tokenizers": ("kvdisk/cli/why.py",),
    "pytest": ("kvdisk/testing/",),
    "huggingface_hub": ("kvdisk/connector/model_files.py", "kvdisk/model_identity.py", "kvdisk/sglang/identity.py"),
    "modelscope": ("kvdisk/connector/model_files.py",),
}
"""Where a package that is not ours may be imported; what is not listed may be imported nowhere."""
BARRED = {"threading": "kvdisk/manager/", "time": "kvdisk/manager/"}

# Written in pieces, or this file would break its own rule.
HOSTS = tuple(
    ".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org"), ("huggingface", "co"))
)
MACHINE_PATHS = re.compile(r"(?<![\w.~*])/(?:" + "|".join(("root", "home", "work", "Users", "opt", "mnt")) + r")/")


@cache
def committed_files() -> tuple[Path, ...]:
    """Return every file of the checkout that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return tuple(ROOT / name for name in listed if name and (ROOT / name).is_file())


def modules() -> list[Path]:
    return sorted((ROOT / "kvdisk").rglob("*.py"))


def prose() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- What is wrong with one text; each is shown below to find what it looks for. ---


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    """Trees of all modules are large."""
    yield
    parsed.cache_clear()
    known_classes.cache_clear()


def oversized(text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_FUNCTION_LINES:
                yield f"{node.name}: {length} lines"


def crowded_constructors(text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            count = len(node.args.args) + len(node.args.kwonlyargs) - 1
            if count > MOST_PARAMETERS:
                yield f"line {node.lineno}: {count} parameters"


def classes_of(text: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef))


def methods_of(found: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@cache
def known_classes() -> dict[str, ast.ClassDef]:
    return {found.name: found for path in modules() for found in classes_of(path.read_text())}


def is_explained(found: ast.ClassDef, method: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a method has a docstring here, or in a class that this one's bases or docstring
    name."""
    if method in methods_of(found) and ast.get_docstring(methods_of(found)[method]):
        return True
    bases = [node.id for base in found.bases for node in ast.walk(base) if isinstance(node, ast.Name)]
    told = re.findall(r"``(?:\w+\.)*([A-Z]\w*)``", ast.get_docstring(found) or "")
    others = [known_classes()[name] for name in {*bases, *told} - seen - {found.name} if name in known_classes()]
    return any(is_explained(other, method, seen | {found.name}) for other in others)


def unexplained(text: str) -> Iterator[str]:
    for found in classes_of(text):
        names = [name for name in methods_of(found) if not name.startswith("_")]
        if not found.name.startswith("_"):
            yield from (f"{found.name}.{name}" for name in names if not is_explained(found, name))


def scattered_bounds(path: str, text: str) -> Iterator[str]:
    """A bound of the manager that is not read from the module of all bounds when it is needed."""
    if path.startswith("kvdisk/manager/"):
        yield from re.findall(
            r"^ *(?:_?(?:MOST|MAX)_\w+.* = |from kvdisk\.manager\.bounds import ).*", text, re.MULTILINE
        )


class _Imports(ast.NodeVisitor):
    """Collects what a module imports when it runs, so not what only its annotations need."""

    def __init__(self) -> None:
        self.modules: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        only_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.orelse if only_types else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.modules += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "relative imports hide where they go"
        self.modules.append(node.module or "")


def foreign_imports(path: str, text: str) -> Iterator[str]:
    imports = _Imports()
    imports.visit(parsed(text))
    for module in imports.modules:
        package = module.partition(".")[0]
        if package == "kvdisk":
            continue
        if package in sys.stdlib_module_names:
            if path.startswith(BARRED.get(package, "nowhere")):
                yield f"{package} in {path}"
        elif not path.startswith(ROOMS.get(package, ())):
            yield f"{package} in {path}"


def machine_words(text: str) -> Iterator[str]:
    yield from (host for host in HOSTS if host in text)
    yield from MACHINE_PATHS.findall(text)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (fragment and fragment not in anchors(found.read_text())):
            yield target


@pytest.mark.parametrize(
    ("scanner", "planted"),
    [
        (oversized, "def long():\n" + "    x = 1\n" * MOST_FUNCTION_LINES),
        (crowded_constructors, "def __init__(self, a, b, c, d, e, f, *, g, h): pass\n"),
        (
            unexplained,
            'class Own:\n    """See ``Device``."""\n    def poll(self): ...\n    def told_nowhere(self): ...\n',
        ),
        (lambda text: foreign_imports("kvdisk/worker/mover.py", text), "def f():\n    from torch import empty\n"),
        (lambda text: foreign_imports("kvdisk/manager/pool.py", text), "import time\n"),
        (lambda text: foreign_imports("kvdisk/cli/main.py", text), "import requests\n"),
        (lambda text: scattered_bounds("kvdisk/manager/pool.py", text), "_MOST_SLOTS: Final = 4\n"),
        (lambda text: scattered_bounds("kvdisk/manager/pool.py", text), "from kvdisk.manager.bounds import JOBS\n"),
        (machine_words, f"see https://{HOSTS[0]}/simple"),
        (machine_words, "cd /" + "root/src"),
        (lambda text: broken_links(ROOT / "README.md", text), "[gone](docs/gone.md)"),
        (lambda text: broken_links(ROOT / "README.md", text), "[gone](LICENSE#no-such-heading)"),
    ],
)
def test_the_scanners_find_what_they_look_for(scanner, planted):
    assert len(list(scanner(planted))) == 1
    assert not list(scanner("fine = 1\n"))


# --- The rules. ---


def test_functions_are_small():
    assert not [f"{named(path)}: {what}" for path in modules() for what in oversized(path.read_text())]


def test_constructors_take_few_parameters():
    assert not [f"{named(path)}: {what}" for path in modules() for what in crowded_constructors(path.read_text())]


def test_public_methods_are_explained_where_they_are_or_in_the_protocol_that_their_class_names():
    assert not [f"{named(path)}: {what}" for path in modules() for what in unexplained(path.read_text())]


def test_names_say_what_a_thing_is():
    vague = re.compile(r"(?:^|_)(?:utils?|common|helpers?)(?:_|$)|(?:Util|Common|Helper)s?(?![a-z])")
    names = [(named(path), name) for path in modules() for name in re.findall(r"(?:def|class) (\w+)", path.read_text())]
    assert not [name for name in [*names, *((named(path), path.stem) for path in modules())] if vague.search(name[1])]


def test_foreign_packages_stay_in_their_rooms():
    assert not [what for path in modules() for what in foreign_imports(named(path), path.read_text())]


def test_the_managers_bounds_are_in_one_place():
    assert not [what for path in modules() for what in scattered_bounds(named(path), path.read_text())]


def test_every_python_file_names_its_licence():
    first = "# SPDX-License-Identifier: Apache-2.0\n"
    assert not [named(p) for p in committed_files() if p.suffix == ".py" and not p.read_text().startswith(first)]


def test_nothing_names_a_machine_or_a_registry():
    found = []
    for path in committed_files():
        found += [f"{named(path)}: {what}" for what in machine_words(path.read_text(errors="replace"))]
    assert not found


def test_links_lead_somewhere():
    assert not [f"{named(path)}: {what}" for path in prose() for what in broken_links(path, path.read_text())]


@pytest.mark.parametrize("tool", sorted((ROOT / "tools").glob("*.py")), ids=lambda tool: tool.stem)
def test_every_tool_can_be_imported(tool):
    if tool.stem != "measure_scheduler":  # tests/connector/test_size.py, where vLLM is loaded
        importlib.import_module(tool.stem)


def contract_layers() -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layered,) = [contract for contract in contracts if contract["type"] == "layers"]
    return [[module.strip() for module in layer.split("|")] for layer in layered["layers"]]


def drawn_floors() -> dict[str, int]:
    """Return the floor of each top-level module, as the diagram in docs/ARCHITECTURE.md has it."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    (diagram,) = re.findall(r"^```\n(floor 5 .*?)^```", text, re.MULTILINE | re.DOTALL)
    floors = {}
    for line in diagram.splitlines():
        number = re.match(r"floor (\d)", line)
        assert number is not None, line
        for name in re.findall(r"kvdisk/(\w+)(?:/|\.py)", line):
            assert name not in floors, f"{name} is drawn twice"
            floors[name] = int(number[1])
    return floors


def test_the_drawn_floors_are_the_contract_and_the_code():
    floors = drawn_floors()
    exists = {
        path.stem for path in (ROOT / "kvdisk").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(floors) == exists - {"__init__"}
    layers = [[floors[module.removeprefix("kvdisk.")] for module in layer] for layer in contract_layers()]
    assert sorted(module for layer in contract_layers() for module in layer) == sorted(
        f"kvdisk.{name}" for name in floors
    )
    assert all(len(set(layer)) == 1 for layer in layers), "a layer of the contract lies on two floors"
    assert all(upper[0] >= lower[0] for upper, lower in pairwise(layers)), "the contract's order is not the diagram's"


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CHANGING.md"])
def test_the_architecture_names_only_modules_that_exist(name):
    text = (ROOT / "docs" / name).read_text()
    assert not {Path(name).name for name in re.findall(r"[\w/]+\.py", text)} - {path.name for path in modules()}


def test_the_architecture_names_only_members_that_exist():
    """Each ``Class.member``, by the classes of ours; it may be one of several classes of a name."""
    members: dict[str, set[str]] = {}
    for node in (each for path in modules() for each in ast.walk(parsed(path.read_text()))):
        if isinstance(node, ast.ClassDef):
            bodies = (each.target if isinstance(each, ast.AnnAssign) else each for each in node.body)
            names = (getattr(each, "name", getattr(each, "id", "")) for each in bodies)
            members.setdefault(node.name, set()).update(names)
    texts = [(ROOT / "docs" / name).read_text() for name in ("ARCHITECTURE.md", "CHANGING.md")]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)", "".join(texts))
    assert len(named) > 30 and not [each for each in named if each[1] not in members.get(each[0], ())]


def test_where_a_change_goes_names_what_is_in_its_file():
    """Names in parentheses behind a module."""
    text = (ROOT / "docs/CHANGING.md").read_text()
    rows = re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", text)
    sources = {path: "".join(each.read_text() for each in (ROOT / "kvdisk").rglob(path)) for path, _ in rows}
    named = [(path, name) for path, inside in rows for name in re.findall(r"`(?:\w+\.)*(\w+)`", inside)]
    assert len(named) > 40 and not [(path, name) for path, name in named if name not in sources[path]]


def imports_of(name: str, known: Collection[str]) -> set[str]:
    """Return the modules of ours that one imports, those for type checking included."""
    path = ROOT / name.replace(".", "/")
    tree = parsed((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{each.name}" for each in node.names]
            found |= {each if each in known else node.module for each in whole}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & set(known) - {name}


def test_no_modules_import_each_other_in_a_circle():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "kvdisk").rglob("*.py")]
    names = [name.removesuffix(".__init__") for name in names]
    order = TopologicalSorter({name: imports_of(name, names) for name in names})
    order.prepare()  # raises CycleError, and says which
