# SPDX-License-Identifier: Apache-2.0
"""The flags and variables of vLLM that the documentation names are those of the vLLM that is
installed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
NOT_VLLMS = {"--json"}
"""Of kvdisk's own commands, beside those of vLLM in one block."""


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return all flags of ``vllm serve``, or of ``vllm bench serve``."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    if command == "vllm bench serve":
        from vllm.benchmarks.serve import add_cli_args

        add_cli_args(parser)
    else:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

        parser = make_arg_parser(parser)
    return frozenset(option for action in parser._actions for option in action.option_strings)


def rows() -> list[str]:
    """Return the first cell of each row of the page of flags."""
    text = (ROOT / "docs/FLAGS.md").read_text()
    return [cell for cell in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) if cell.startswith("`")]


def commands() -> list[tuple[str, str, str]]:
    """Return each command of vLLM's in a fenced block of the documentation: page, name, text."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
            for name, text in re.findall(
                r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(vllm (?:bench )?serve)\b(.*(?:\n +.*)*)", block, re.MULTILINE
            ):
                found.append((page.name, name, text))
    return found


def test_each_flag_of_the_page_is_one_of_vllm_serve():
    named = [flag for cell in rows() for flag in FLAG.findall(cell)]
    assert len(named) > 25 and len(named) == len(set(named))
    assert set(named) <= flags_of("vllm serve")


def test_each_variable_of_the_page_is_one_of_vllm():
    from vllm import envs

    named = [name for cell in rows() for name in re.findall(r"`(VLLM_\w+)`", cell)]
    assert named and set(named) <= envs.environment_variables.keys()


def test_the_page_says_of_each_hash_whether_it_is_refused():
    from vllm.config.cache import PrefixCachingHashAlgo

    (line,) = [
        line for line in (ROOT / "docs/FLAGS.md").read_text().splitlines() if "--prefix-caching-hash-algo" in line
    ]
    assert set(re.findall(r"`((?:sha256|xxhash)\w*)`", line)) == set(PrefixCachingHashAlgo.__args__)


@pytest.mark.parametrize(("page", "name", "text"), commands(), ids=lambda part: part if len(part) < 30 else "")
def test_each_command_of_the_documentation_has_flags_that_there_are(page, name, text):
    named = set(FLAG.findall(re.sub(r"'[^']*'", "", text))) - NOT_VLLMS
    assert named <= flags_of(name), page


@pytest.mark.parametrize("page", ["README.md", "QUICKSTART.md", "CONFIGURATION.md", "index.md"])
def test_who_copies_a_command_gets_a_server_that_ends_in_order(page):
    texts = [text for where, name, text in commands() if (where, name) == (page, "vllm serve")]
    assert texts and all("--shutdown-timeout 30" in text for text in texts)
