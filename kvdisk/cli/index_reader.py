# SPDX-License-Identifier: Apache-2.0
"""Has the indexes of homes read by a process of its own (``index_child``), and takes in what it says of them.

LMDB maps its file: in one that was cut short or overwritten it can run into memory that is not there, which kills
the process (SIGBUS, SIGSEGV) instead of raising. So the tools let a child read; if it dies, that is one home's
problem, and another child goes on without it. The child shares no open index with its parent either, and it alone
loads numpy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.block_facts import BlockTally, HomeBlocks, Prefix, PrefixTree, SegmentLayout
from kvdisk.index.base import SegmentRecord

CHILD = "kvdisk.cli.index_child"
_DAMAGED: dict[int, str] = {signal.SIGBUS: "SIGBUS", signal.SIGSEGV: "SIGSEGV", signal.SIGABRT: "SIGABRT"}


class IndexFacts(NamedTuple):
    """What one index holds. ``problem`` says in one sentence why it cannot be read; then the rest is empty.

    ``exists`` is False where no index has been made yet.
    """

    segments: tuple[SegmentRecord, ...] = ()
    tallies: tuple[BlockTally, ...] = ()
    exists: bool = True
    problem: str | None = None
    blocks: HomeBlocks | None = None


class IndexedHome(NamedTuple):
    """Where a home's index and USES file are, and how many parts a block has on the drive."""

    index_path: Path
    uses_path: Path
    ranks: int


class IndexedNamespace(NamedTuple):
    """Homes of one namespace. ``block_tokens``: by KV-cache group, as far as they are known."""

    homes: tuple[IndexedHome, ...]
    block_tokens: tuple[int | None, ...] = ()


class Answers(NamedTuple):
    """What the child said, in the order of the question: of each home, and of each namespace.

    A sentence in place of an answer says why there is none.
    """

    homes: list[list[Any]]
    namespaces: list[Any]


def ask_child(namespaces: Sequence[IndexedNamespace], question: Mapping[str, Any]) -> Answers:
    """Have the child answer a question. Never raises for what is wrong with a home.

    Nothing is written but the mark that a reader of LMDB leaves in ``lock.mdb``, where that can be written.
    """
    answers = Answers([[None] * len(namespace.homes) for namespace in namespaces], [])
    while (done := len(answers.namespaces)) < len(namespaces):
        asked = dict(question) | {
            "namespaces": [
                [_described(homes, answers.homes[number]), homes.block_tokens]
                for number, homes in enumerate(namespaces)
                if number >= done
            ]
        }
        child = subprocess.run(  # noqa: S603 - a module of this package, in this same interpreter
            [sys.executable, "-m", CHILD],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
        )
        # What a child was writing when it died has no newline.
        for line in child.stdout.splitlines(keepends=True):
            if line.endswith("\n"):
                home, answer = json.loads(line)
                if home is None:
                    answers.namespaces.append(answer)
                else:
                    answers.homes[len(answers.namespaces)][home] = answer
        if len(answers.namespaces) < len(namespaces):
            _note_death(answers, _cause_of_death(child))
    return answers


def _described(namespace: IndexedNamespace, answers: list[Any]) -> list[list[Any] | None]:
    """Return the homes as the child is told of them; None for one that has ended a child before."""
    return [
        None if isinstance(answer, str) else [str(home.index_path), str(home.uses_path), home.ranks]
        for home, answer in zip(namespace.homes, answers, strict=True)
    ]


def _note_death(answers: Answers, cause: str) -> None:
    """Put the cause in place of the answer that the child was at."""
    of_homes = answers.homes[len(answers.namespaces)]
    unread = [number for number, answer in enumerate(of_homes) if answer is None]
    if unread:
        of_homes[unread[0]] = cause
        # The others are read again, for what they have together.
        of_homes[:] = [answer if isinstance(answer, str) else None for answer in of_homes]
    else:
        answers.namespaces.append(cause)


def read_indexes(
    namespaces: Sequence[IndexedNamespace], now_s: int, prefixes: int, *, shared_only: bool = True
) -> tuple[list[list[IndexFacts]], list[PrefixTree | None]]:
    """Return what the homes' indexes hold, and the biggest prefixes of each namespace, in order.

    A tree is None where it could not be made. ``prefixes``, ``shared_only``: see ``prefixes.find_prefixes``.
    """
    question = {"what": "survey", "now_s": now_s, "prefixes": prefixes, "shared_only": shared_only}
    answers = ask_child(namespaces, question)
    return (
        [[_facts(answer) for answer in of_homes] for of_homes in answers.homes],
        [None if isinstance(answer, str) else _tree(answer) for answer in answers.namespaces],
    )


def _facts(answer: Any) -> IndexFacts:
    if isinstance(answer, str):
        return IndexFacts(problem=answer)
    if answer is False:
        return IndexFacts(exists=False)
    segments, tallies, (layouts, stored, used, reuse) = answer
    return IndexFacts(
        tuple(SegmentRecord(*fields) for fields in segments),
        tuple(BlockTally(*fields) for fields in tallies),
        blocks=HomeBlocks(
            tuple(SegmentLayout(*fields) for fields in layouts),
            tuple(stored),
            None if used is None else tuple(used),
            None if reuse is None else tuple(reuse),
        ),
    )


def _tree(answer: Any) -> PrefixTree:
    prefixes, *rest = answer
    return PrefixTree(tuple(Prefix(*fields) for fields in prefixes), *rest)


def _cause_of_death(child: subprocess.CompletedProcess[str]) -> str:
    if -child.returncode in _DAMAGED:
        return f"the file is damaged, reading it ended in {_DAMAGED[-child.returncode]}"
    last_words = child.stderr.strip().splitlines()[-1:] or [f"status {child.returncode}"]
    return f"the process that reads it failed, {last_words[0]}"
