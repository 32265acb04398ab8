# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect --json`` prints: one object, whose shape changes only with ``json_version``.

Bytes are integers, and ``*_s`` are whole seconds since the Unix epoch. ``null``: cannot be known, since a file cannot
be read, or there is nothing (no block, no live owner). A block, or a slot, has a part on every rank and counts once;
bytes are those of all ranks together. Lists of homes are in order of last use, the last first::

    json_version       1
    kvdisk_version     of the command
    surveyed_s         when
    ok                 false: ``problems`` says what is wrong, and the exit code is 1
    problems           sentences
    store              path, store_id, format_version, created_s
    totals             namespaces, homes, live_homes, unreadable_homes (their blocks are missing from the sums),
                       blocks, slots, used_bytes, allocated_bytes, cap_bytes (of the live owners together),
                       oldest_stored_s, newest_stored_s
    namespaces[]       fingerprint (hex), model, dtype, kv_dtype, tensor_parallel, ranks, hash_tokens,
                       homes[] (ids), unreadable_homes, blocks, used_bytes, oldest_stored_s, newest_stored_s
      groups[]         group, block_tokens, payload_bytes and slot_bytes (both on one rank), window_tokens, blocks
      epochs[]         epoch (0: of the weights as the files have them), blocks
    homes[]            id, fingerprint (hex), owner ("alive" or "orphan"), clean (its last owner closed it in order;
                       false while one lives), ranks, cap_bytes, allocated_bytes, used_bytes, blocks, slots,
                       fill (used_bytes / cap_bytes), created_s, last_use_s, oldest_stored_s, newest_stored_s,
                       index_readable, problems (sentences)
      segments[]       segment, drive (position among the home's), indexed (false: being made, or left by a crash),
                       slot_bytes (on one rank), slots, used_slots, used_bytes, fill (used_slots / slots)
        files[]        rank, length_bytes, allocated_bytes

Allocated bytes are those that the file system holds, with index and control files; used bytes are those of slots that
hold blocks, each with its header.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvdisk import __version__
from kvdisk.cli.survey import HomeFacts, NamespaceFacts, SegmentFacts, StoreFacts, stored_range

JSON_VERSION = 1


def store_as_json(facts: StoreFacts) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "surveyed_s": facts.surveyed_s,
        "ok": not facts.problems,
        "problems": list(facts.problems),
        "store": {
            "path": str(facts.path),
            "store_id": facts.store_id,
            "format_version": facts.format_version,
            "created_s": facts.created_s,
        },
        "totals": {
            "namespaces": len(facts.namespaces),
            "homes": len(facts.homes),
            "live_homes": sum(home.alive for home in facts.homes),
            "unreadable_homes": sum(home.tallies is None for home in facts.homes),
            "blocks": sum(home.blocks or 0 for home in facts.homes),
            "slots": sum(home.slots for home in facts.homes),
            "used_bytes": sum(home.used_bytes or 0 for home in facts.homes),
            "allocated_bytes": sum(home.allocated_bytes for home in facts.homes),
            "cap_bytes": facts.cap_bytes,
            **_stored(facts.homes),
        },
        "namespaces": [_namespace(namespace) for namespace in facts.namespaces],
        "homes": [_home(home) for home in facts.homes],
    }


def _namespace(namespace: NamespaceFacts) -> dict[str, Any]:
    description = namespace.description
    described = description.get("groups")
    groups = [group for group in described if isinstance(group, dict)] if isinstance(described, list) else []
    names = ("model", "dtype", "kv_dtype", "tensor_parallel", "ranks", "hash_tokens")
    group_names = ("block_tokens", "payload_bytes", "slot_bytes", "window_tokens")
    return {
        "fingerprint": namespace.fingerprint.hex(),
        **{name: description.get(name) for name in names},
        "homes": [home.id for home in namespace.homes],
        "unreadable_homes": sum(home.tallies is None for home in namespace.homes),
        "blocks": sum(home.blocks or 0 for home in namespace.homes),
        "used_bytes": namespace.used_bytes,
        **_stored(namespace.homes),
        "groups": [
            {
                "group": position,
                **{name: group.get(name) for name in group_names},
                "blocks": namespace.blocks_by_group.get(position, 0),
            }
            for position, group in enumerate(groups)
        ],
        "epochs": [{"epoch": epoch, "blocks": blocks} for epoch, blocks in namespace.blocks_by_epoch.items()],
    }


def _home(home: HomeFacts) -> dict[str, Any]:
    record = home.record
    return {
        "id": home.id,
        "fingerprint": record.fingerprint.hex() if record else None,
        "owner": "alive" if home.alive else "orphan",
        "clean": record.clean if record else None,
        "ranks": home.ranks,
        "cap_bytes": record.cap_bytes if record else None,
        "allocated_bytes": home.allocated_bytes,
        "used_bytes": home.used_bytes,
        "blocks": home.blocks,
        "slots": home.slots,
        "fill": home.fill,
        "created_s": record.created_s if record else None,
        "last_use_s": record.last_use_s if record else None,
        **_stored([home]),
        "index_readable": home.tallies is not None,
        "problems": list(home.problems),
        "segments": [_segment(segment, home.ranks) for segment in home.segments],
    }


def _segment(segment: SegmentFacts, ranks: int) -> dict[str, Any]:
    return {
        "segment": segment.segment,
        "drive": segment.drive,
        "indexed": segment.indexed,
        "slot_bytes": segment.slot_bytes,
        "slots": segment.slots,
        "used_slots": segment.used_slots,
        "used_bytes": segment.used_bytes(ranks),
        "fill": segment.fill,
        "files": [
            {"rank": file.rank, "length_bytes": file.length_bytes, "allocated_bytes": file.allocated_bytes}
            for file in segment.files
        ],
    }


def _stored(homes: Iterable[HomeFacts]) -> dict[str, int | None]:
    oldest_s, newest_s = stored_range(homes) or (None, None)
    return {"oldest_stored_s": oldest_s, "newest_stored_s": newest_s}
