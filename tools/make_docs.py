# SPDX-License-Identifier: Apache-2.0
"""Make the pages that say what the code says: docs/CONFIGURATION.md from ``Config``, docs/CLI.md
from the help, the tables of docs/METRICS.md from ``kvdisk.stats``, and docs/MODULES.md from the
first words of each module; and fill the figures of README, docs/BENCHMARKS.md and
docs/measurements, which ``tools/measure_all.py`` measures.

``tests/test_docs.py`` holds them equal. What the commands print is in docs/output, which
``tools/make_pictures.py`` writes.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, cast, get_args

import figure_pages
import figures
import typer.main

from kvdisk.cli.main import app
from kvdisk.config import PARSERS, Config
from kvdisk.errors import ConfigError
from kvdisk.stats import METRICS, Kind, Metric

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTPUT = DOCS / "output"
PICTURES = DOCS / "pictures"
VALUES = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "FILE"}
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


# --- The configuration. ---


@dataclass(frozen=True)
class Setting:
    """One field of Config as its documentation has it. ``default``, ``form``: Markdown.
    ``examples``: JSON."""

    key: str
    meaning: str
    form: str
    default: str
    examples: tuple[str, ...]

    @property
    def first_sentence(self) -> str:
        """What the table of all settings says."""
        return re.split(r"(?<=[.:]) (?=[A-Z`])", self.meaning, maxsplit=1)[0].rstrip(":.") + "."


def settings() -> list[Setting]:
    """Return the settings in the order of Config. Raises ValueError where a field is not
    documented."""
    (tree,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(tree, ast.ClassDef)
    said = {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    return [_setting(field.name, field.default, said.get(field.name, "")) for field in fields(Config)]


def _setting(key: str, default: Any, said: str) -> Setting:
    meaning, _, rest = said.partition("\n\n")
    notes = [line.partition(": ") for line in rest.splitlines()]
    if not meaning or not all(name in {"Default", "Example"} and value for name, _, value in notes):
        raise ValueError(f"Config.{key} must be followed by what it means, and lines 'Default: ...' and 'Example: ...'")
    defaults = [value for name, _, value in notes if name == "Default"]
    if len(defaults) != (default in (None, ())):
        raise ValueError(
            f"Config.{key} needs one line 'Default: ...' if and only if the field's own default says nothing"
        )
    return Setting(
        key=key,
        meaning=" ".join(meaning.split()),
        form=_form(key),
        default=defaults[0] if defaults else f"`{_as_json(key, default)}`",
        examples=tuple(value for name, _, value in notes if name == "Example"),
    )


def _form(key: str) -> str:
    """Return what the parser says that a value must be."""
    said = ""
    try:
        PARSERS[key](key, "")
    except ConfigError as error:
        said = str(error)
    found = re.fullmatch(rf"{key} must be (.*), not (?:''|a str)\.", said)
    assert found is not None, f"an empty text for {key}: {said!r}"
    return re.sub(r"'([^']*)'", r'`"\1"`', found[1])


def _as_json(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        for size, unit in UNITS:
            if value and value % size == 0:
                return json.dumps(f"{value // size}{unit}")
    return json.dumps(value)


def configuration() -> str:
    """Return docs/CONFIGURATION.md."""
    found = settings()
    rows = "\n".join(f"| [`{one.key}`](#{one.key}) | {one.default} | {one.first_sentence} |" for one in found)
    return CONFIGURATION.format(rows=rows, sections="\n".join(_section(one) for one in found))


def _section(one: Setting) -> str:
    examples = ", ".join(f'`"{one.key}": {value}`' for value in one.examples)
    word = "Example" if len(one.examples) == 1 else "Examples"
    meaning = textwrap.fill(one.meaning, 100, break_long_words=False, break_on_hyphens=False)
    return f"### {one.key}\n\n{meaning}\n\n- Value: {one.form}\n- Default: {one.default}\n- {word}: {examples}\n"


CONFIGURATION = """\
# Configuration

<!-- Made by tools/make_docs.py from Config in kvdisk/config.py: change it there. -->

For those who set up an engine: what can be set, and what is the default?

Each setting is a variable, or a key of `kv_connector_extra_config`, which is a part of vLLM's
`--kv-transfer-config`. One is enough to have vLLM use kvdisk; without `KVDISK_STORE_DIRS` blocks
are kept in host memory alone, 4 GiB unless you say otherwise.
With a drive:

```
KVDISK_STORE_DIRS=/nvme/kv KVDISK_NVME_BYTES=500GiB KVDISK_CPU_BYTES=32GiB vllm serve MODEL --shutdown-timeout 30
```

```
vllm serve MODEL --shutdown-timeout 30 --kv-transfer-config '{{"kv_connector":"KVDiskConnector","kv_role":"kv_both",
  "kv_connector_extra_config":{{"store_dirs":"/nvme/kv","nvme_bytes":"500GiB","cpu_bytes":"32GiB"}}}}'
```

An unknown key, a wrong value or a directory that is not fit ends the start in seconds, before the
model is loaded, with one sentence. `kvdisk check` says the same without vLLM, and more:

```
kvdisk does not know the setting 'stor_dirs'; the nearest it knows is 'store_dirs'.
cpu_bytes must be a size in bytes such as 1073741824 or '500GiB', not '4 gigs'.
```

**Sizes** are bytes: an integer, or text with a unit. `KiB`, `MiB`, `GiB` and `TiB` are powers of
1024, and so are `Ki`, `Mi`, `Gi` and `Ti`, as Kubernetes writes them. `kB`, `MB`, `GB`, `TB` and
`K`, `M`, `G`, `T` are powers of 1000. Capitals do not matter, but `m` alone is refused. A size
*over all ranks* is shared by the engine's workers: each takes its share. **Times** are seconds.
`null` is the default. [Operating](OPERATING.md#limits-of-a-request) says what a request may ask for
itself.

## As variables

`KVDISK_<KEY>` has the key in capitals: `KVDISK_STORE_DIRS`, `KVDISK_NVME_ADMISSION`. vLLM's plugin
reads them where an engine's configuration is built.

- **The command line wins.** With `--kv-transfer-config` or `--kv-offloading-size` the variables set
  nothing. A line of the log says which they are, and who has won.
- **Values** are text, or JSON where they are some: `500GiB`, `true`, `600`, `{{"aws_region": "eu"}}`.
  Commas separate directories in `KVDISK_STORE_DIRS`; a directory with a comma needs JSON. An empty
  variable counts as not set.
- **A name that kvdisk does not know** ends the start with one sentence, and so does a wrong value.
  Names as Kubernetes makes them of a Service called `kvdisk` are left alone.
- **`KVDISK_DOOR=offloading`** takes the [other door](OFFLOADING.md): the tier's settings are
  variables then, and `KVDISK_CPU_BYTES` is vLLM's memory. `connector` is the default.
- **`kvdisk check`** reads them where it is given no file. **`kvdisk start-args`** prints the JSON.
- **A model that kvdisk refuses** is refused with variables, too. Start that server without them:
  `env -u KVDISK_STORE_DIRS -u KVDISK_NVME_BYTES vllm serve MODEL`.
- **Set them on each machine** of an engine with `--nnodes`. One without them stores nothing: then
  nothing hits, and a prompt that comes back waits up to `lookup_wait_s` before it is computed.
  Engines, workers and Ray's actors are sent the configuration, and look at no variable.

| key | default | |
|---|---|---|
{rows}

## Each setting

{sections}"""


# --- The command line. ---


@cache
def commands() -> list[tuple[str, Any]]:
    """Return each command with its name, in the order of the help."""
    group: Any = typer.main.get_command(app)
    return [(name, group.get_command(None, name)) for name in group.list_commands(None)]


def command_line() -> str:
    """Return docs/CLI.md."""
    rows = [f"| [`kvdisk {name}`](#kvdisk-{name}) | {_first_line(command)} |" for name, command in commands()]
    sections = [_command(name, command) for name, command in commands()]
    return COMMAND_LINE.format(rows="\n".join(rows), sections="\n".join(sections))


def _command(name: str, command: Any) -> str:
    text, codes = _split_help(command.help or "")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([f"kvdisk {name}", *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)])
    parts = [f"## kvdisk {name}", f"```\n{usage}\n```", text]
    taken = [(f"`{_metavar(one)}`", one) for one in arguments] + [(_names(one), one) for one in options]
    if taken:
        rows = "\n".join(f"| {label} | {_explained(one)} |" for label, one in taken)
        parts.append(f"| option | |\n|---|---|\n{rows}")
    if codes:
        rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in codes)
        parts.append(f"| exit code | |\n|---|---|\n{rows}")
    parts += [_output(path) for path in (OUTPUT / f"{name}.txt", *sorted(OUTPUT.glob(f"{name}-[0-9].txt")))]
    return "\n\n".join(parts) + "\n"


def _output(path: Path) -> str:
    """Return what a command printed; and where it made a page, the picture of that."""
    text = path.read_text().rstrip()
    made = re.search(r" (\S+\.html)$", text.partition("\n")[0])
    shown = f"\n\n![{made[1]}](pictures/{path.stem}.png)" if made else ""
    return f"```\n{text}\n```{shown}"


def _first_line(command: Any) -> str:
    text, _ = _split_help(command.help or "")
    return text.partition("\n")[0]


def _split_help(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what a command's help says as Markdown, and its exit codes, which end it."""
    said, _, ending = inspect.cleandoc(text).partition("[bold]Exit codes[/bold]")
    codes = [(code, " ".join(_plain(meaning).split())) for code, meaning in CODE.findall(ending)]
    paragraphs = [_plain(" ".join(one.split())) for one in re.split(r"\n\s*\n|\f", said) if one.strip()]
    return "\n\n".join(paragraphs), codes


CODE = re.compile(r"\[cyan\](\d+)\[/cyan\]\s+(.*?)\s*(?=\n\s*\n|\Z)", re.DOTALL)


def _plain(text: str) -> str:
    """Take rich's markup out, and keep Markdown from reading anything into the rest."""
    return re.sub(r"\[/?[a-z ]+\]", "", text).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def _metavar(one: Any) -> str:
    if one.metavar:
        return str(one.metavar)
    return str(one.human_readable_name).upper() + ("..." if one.nargs == -1 else "")


def _names(one: Any) -> str:
    names = ", ".join([*one.opts, *one.secondary_opts])
    if one.is_flag:
        return f"`{names}`"
    value = one.metavar or ("" if _choices(one) else VALUES[_value_type(one)])
    return f"`{names}{f' {value}' if value else ''}`"


def _value_type(one: Any) -> type:
    """Return the type of an option's value, or of each where it takes several."""
    kinds = [one.type_descriptor.annotation]
    while inner := [kind for kind in get_args(kinds[0]) if kind is not type(None)]:
        kinds = inner
    return cast(type, kinds[0])


def _choices(one: Any) -> list[str]:
    kind = _value_type(one)
    return [str(choice.value) for choice in kind] if issubclass(kind, Enum) else []


def _explained(one: Any) -> str:
    said = _plain(" ".join((one.help or "").split()))
    if choices := _choices(one):
        said += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    default = one.default
    if default is None or default is False or callable(default) or default in ((), [], ""):
        return said
    values = default if isinstance(default, list | tuple) else [default]
    shown = ", ".join(f"`{getattr(value, 'value', value)}`" for value in values)
    return f"{said} Default: {shown}."


COMMAND_LINE = """\
# Command line

<!-- Made by tools/make_docs.py from the help of each command, and by tools/make_pictures.py, which ran them. -->

The command `kvdisk` looks into stores, and after them. It comes with the package, and needs neither a GPU nor vLLM nor
torch. It works on a store in use, on one that can only be read, and on a copy.

| command | |
|---|---|
{rows}

With several `store_dirs`, name them all, the first one first. `--json` prints one object for scripts, with bytes and
times as integers. `kvdisk --install-completion` makes the shell complete commands and options; `kvdisk COMMAND --help`
says what this page says.

The outputs are of a store that `tools/make_pictures.py` makes: two models, and three engine stores.

{sections}"""


# --- The metrics. ---


KINDS = {Kind.COUNTER: "Counters", Kind.GAUGE: "Gauges", Kind.HISTOGRAM: "Histograms"}


def _metrics_of(kind: Kind) -> str:
    """Return the table of the metrics of a kind, in Markdown."""
    rows = [_metric(metric) for metric in METRICS.values() if metric.kind is kind]
    return "\n".join(("| metric | label | what it is |", "|---|---|---|", *rows))


def _metric(metric: Metric) -> str:
    suffix = "_total" if metric.kind is Kind.COUNTER else ""
    values = f": {', '.join(f'`{value}`' for value in metric.values)}" if metric.values else ""
    label = f"`{metric.label}`{values or ': number of the drive'}" if metric.label else ""
    return f"| `vllm:kvdisk_{metric.name}{suffix}` | {label} | {metric.about} |"


def with_metrics(text: str) -> str:
    """Return a text of Markdown with the table under each heading that names a kind replaced."""
    for kind, heading in KINDS.items():
        before, table = re.split(rf"(?<=^### {heading}\n\n)", text, flags=re.MULTILINE)
        behind = re.search(r"^#|\Z", table, re.MULTILINE)
        assert behind is not None
        text = f"{before}{_metrics_of(kind)}\n\n{table[behind.start() :]}"
    return text.rstrip("\n") + "\n"


def metrics() -> str:
    """Return docs/METRICS.md with its tables anew."""
    return with_metrics((DOCS / "METRICS.md").read_text())


# --- The modules. ---

PACKAGES = (
    "",
    "manager",
    "worker",
    "index",
    "device",
    "remote",
    "connector",
    "cli",
    "cli/replay",
    "cli/report",
    "cli/web",
    "sglang",
    "lmcache",
    "testing",
)
"""The folders of kvdisk/, in the order of docs/MODULES.md."""


def modules() -> str:
    """Return docs/MODULES.md."""
    found = {path.parent for path in (ROOT / "kvdisk").rglob("*.py")}
    folders = [ROOT / "kvdisk" / package for package in PACKAGES]
    assert found == set(folders), "PACKAGES names each folder once"
    return MODULES.format(tables="\n\n".join(map(_modules_of, folders)))


def _modules_of(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    files = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    rows = [f"| `{path.name}` | {_first_words(path)} |" for path in files]
    lines = [f"## {name}/", "", _first_words(folder / "__init__.py"), "", "| module | what it is |", "|---|---|", *rows]
    return "\n".join(lines)


def _first_words(path: Path) -> str:
    """Return the first paragraph of a module's docstring, without the thread that may call it."""
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said, f"{path} does not say what it is"
    first = " ".join(said.partition("\n\n")[0].split())
    return first.removesuffix("Scheduler thread only.").rstrip().replace("``", "`").replace("|", "\\|")


MODULES = """\
# Modules

<!-- Made by tools/make_docs.py from the first words of each module: change them there. -->

For those who look for a piece of the code: which module does what?

[Where a change goes](CHANGING.md) names the files of a change, [the architecture](ARCHITECTURE.md)
what must hold there.

{tables}
"""


# --- The figures. ---


def with_figures(path: Path) -> str:
    """Return a page with its figures as docs/measurements/figures.json has them."""
    return figure_pages.filled(path.read_text(), figures.read())


FILES: dict[Path, Callable[[], str]] = {
    **{path: partial(with_figures, path) for path in figure_pages.PAGES},
    DOCS / "CONFIGURATION.md": configuration,
    DOCS / "MODULES.md": modules,
    DOCS / "CLI.md": command_line,
    DOCS / "METRICS.md": metrics,
}


def main() -> None:
    for path, make in FILES.items():
        if not path.exists() or path.read_text() != make():
            path.write_text(make())
            print(f"kvdisk: {path.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
