# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, each with SGLang's tree, controller and threads, and a store of its
own in one directory; and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.rank_process import PAGES
from hicache.trees import Tree, extra_config, kv_of, prompt

TOKENS = len(prompt(0, PAGES))
WAIT_S = 240.0


def start(tmp_path, model, acts, rank=0, size=1, turn=0, **order):
    """Start a rank's process. Those of one ``turn`` meet."""
    whole = {"model": str(model), "store": str(tmp_path / "store"), "meet": str(tmp_path / f"meet-{turn}")}
    whole |= {"rank": rank, "size": size, "acts": acts, "mla": False} | order
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    log = (tmp_path / f"rank-{turn}-{rank}.log").open("w")
    command = [sys.executable, "-m", "hicache.rank_process", json.dumps(whole)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


def run(tmp_path, model, acts, size=1, **order):
    """Run all ranks to their end; return what each has said."""
    turn = len(list(tmp_path.glob("rank-*.log")))
    ranks = [start(tmp_path, model, acts, rank, size, turn, **order) for rank in range(size)]
    said = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
    logs = [(tmp_path / f"rank-{turn}-{rank}.log").read_text()[-3000:] for rank in range(size)]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(logs)
    return [[json.loads(line) for line in each.splitlines()] for each in said]


def loaded(said):
    return [[line["tokens"] for line in each if "loaded" in line] for each in said]


@pytest.mark.parametrize("mla", [False, True])
def test_two_ranks_find_after_a_restart_what_both_have(tmp_path, model, mla):
    """With MLA rank 0 writes, and rank 1 reads what it wrote."""
    acts = [("compute", 0), ("compute", 1), ("commit", 0.5)]
    run(tmp_path, model, acts, size=2, mla=mla)
    # Ranks that start together look for each other's stores each quarter of a second.
    later = [("commit", 2.0), ("load", 0), ("load", 1), ("load", 7), ("compute", 2)]
    said = run(tmp_path, model, later, size=2, mla=mla)
    assert loaded(said) == [[TOKENS, TOKENS, 0]] * 2
    assert all(each[-1] == {"alive": True} for each in said)


def test_what_one_rank_lacks_no_rank_has(tmp_path, model):
    """A bit of one rank's page has flipped: SGLang takes the minimum, and each byte is right."""
    run(tmp_path, model, [("compute", 0), ("commit", 0.5)], size=2)
    page = kv_of(prompt(0, PAGES), 2, 0, 0, 256)[4 * 16].tobytes()  # rank 1's, of the fifth page
    hits = [file for file in (tmp_path / "store").rglob("*") if file.is_file() and flip(file, page)]
    assert len(hits) == 1
    said = run(tmp_path, model, [("load", 0)], size=2)
    assert loaded(said) == [[4 * 16]] * 2


def flip(file, row):
    """Flip a bit of a token's row, where the file has it."""
    content = bytearray(file.read_bytes())
    at = content.find(row)
    if at >= 0:
        content[at + 9] ^= 1
        file.write_bytes(content)
    return at >= 0


@pytest.mark.parametrize("mla", [False, True])
def test_a_killed_process_loses_nothing_that_was_committed(tmp_path, model, mla):
    acts = [act for number in range(40) for act in (("compute", number), ("commit", 0.2))]
    process = start(tmp_path, model, acts, mla=mla)
    committed = 0
    for line in process.stdout:
        committed += "committed" in json.loads(line)
        if committed == 5:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    again = Tree(model, extra_config(tmp_path / "store"), mla=mla)
    assert [again.load(prompt(number, PAGES)) for number in range(committed)] == [TOKENS] * committed
    again.close()
