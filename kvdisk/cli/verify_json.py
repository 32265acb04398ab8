# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk verify --json`` prints: one object, whose shape changes only with ``json_version``.

Bytes are integers. A block has a slot on every rank; slots count one by one, and blocks once. ``null``: cannot be
known, or does not apply::

    json_version       1
    kvdisk_version     of the command
    ok                 false: ``homes[].problems`` or ``wrong`` says what is wrong, and the exit code is 1
    stopped            true: broken off (exit code 130); the rest is what was found until then
    path               of the store
    sample_percent     of the blocks of each home were read, at random by ``seed``; null: all
    seed
    seconds            that it took
    totals             homes, blocks (in the indexes), slots, read_bytes, wrong_slots, changed_slots
    homes[]            id, owner ("alive" or "orphan"), blocks, slots (looked at), read_bytes, wrong_slots,
                       changed_slots (their blocks left meanwhile, as they may in a store in use), gone (taken over
                       or deleted meanwhile), problems (sentences, of the home as a whole), notes (not wrong)
    wrong[]            home, drive (position among the home's), segment, rank, path, check, what (in words), slots,
                       slot, offset_bytes (in the file), epoch, key (hex)

``check`` is what failed first. Of a slot: "read" (it cannot be read), "header" (it has no sound one), "version",
"checksum" (of the payload), "group" (its segment has slots of another size), or the field of its header that says
something else than the index: "namespace", "epoch", "key", "generation", "payload_bytes", "rank", "rank_count",
"parent". Of a file of which nothing can be used: "file"; ``slots`` of it hold blocks, and what follows is null.
"""

from __future__ import annotations

from typing import Any

from kvdisk import __version__
from kvdisk.cli.verify import Finding, HomeVerdict, Verdict

JSON_VERSION = 1


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    homes = verdict.homes
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "ok": verdict.ok,
        "stopped": verdict.stopped,
        "path": str(verdict.path),
        "sample_percent": verdict.percent,
        "seed": verdict.seed,
        "seconds": round(verdict.seconds, 3),
        "totals": {
            "homes": len(homes),
            "blocks": sum(home.blocks or 0 for home in homes),
            "slots": sum(home.slots for home in homes),
            "read_bytes": sum(home.bytes for home in homes),
            "wrong_slots": sum(home.wrong_slots for home in homes),
            "changed_slots": sum(home.changed for home in homes),
        },
        "homes": [_home(home) for home in homes],
        "wrong": [_finding(finding) for home in homes for finding in home.findings],
    }


def _home(home: HomeVerdict) -> dict[str, Any]:
    return {
        "id": home.id,
        "owner": "alive" if home.alive else "orphan",
        "blocks": home.blocks,
        "slots": home.slots,
        "read_bytes": home.bytes,
        "wrong_slots": home.wrong_slots,
        "changed_slots": home.changed,
        "gone": home.gone,
        "problems": list(home.problems),
        "notes": list(home.notes),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "home": finding.home_id,
        "drive": finding.drive,
        "segment": finding.segment,
        "rank": finding.rank,
        "path": str(finding.path) if finding.path else None,
        "check": finding.check,
        "what": finding.what,
        "slots": finding.slots,
        "slot": finding.slot,
        "offset_bytes": finding.offset_bytes,
        "epoch": finding.epoch,
        "key": finding.key.hex() if finding.key is not None else None,
    }
