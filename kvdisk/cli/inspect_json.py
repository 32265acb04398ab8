# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect --json`` prints: one object, whose shape changes only with ``json_version``.

Bytes are integers, and ``*_s`` are whole seconds since the Unix epoch. ``null``: cannot be known, since a file cannot
be read, or there is nothing (no block, no live owner). A block, or a slot, has a part on every rank and counts once;
bytes are those of all ranks together. Lists of homes are in order of last use, the last first::

    json_version       2
    kvdisk_version     of the command
    surveyed_s         when
    ok                 false: ``problems`` says what is wrong, and the exit code is 1
    problems           sentences
    store              path, store_id, format_version, created_s
    totals             namespaces, homes, live_homes, unreadable_homes (their blocks are missing from the sums),
                       blocks, slots, used_bytes, allocated_bytes, cap_bytes (of the live owners together),
                       oldest_stored_s, newest_stored_s
    drives[]           store_id, path (null: its directory was not named), homes (with segments there),
                       unreadable_homes, segments, slots, blocks, used_bytes, allocated_bytes (of segment files)
    ages               blocks of all homes by age in seconds when the store was surveyed
      bounds_s[]       class n is below bound n, and has what the classes before it have not; the last has no bound
      stored[]         blocks by the age of their record
      used[]           by the age of their last use; null: no home has a file that tells (USES), as in all that follows
      never_used       blocks that were not used since they were stored
      unknown          blocks of which USES does not tell, such as those stored after it was last written
    reuse              blocks by how often they were used since they were stored; a use is a request that came to the
                       block and found it, in a tier or in the GPU's cache, and not the one that made it
      bounds[]         class n has up to bound n uses, and has what the classes before it have not; the last no bound
      blocks[]         null: as above
      unknown
    namespaces[]       fingerprint (hex), model, dtype, kv_dtype, tensor_parallel, ranks, hash_tokens,
                       homes[] (ids), unreadable_homes, blocks, used_bytes, oldest_stored_s, newest_stored_s
      groups[]         group, block_tokens, payload_bytes and slot_bytes (both on one rank), window_tokens, blocks
      epochs[]         epoch (0: of the weights as the files have them), blocks
      prefixes         null: could not be made
        total, shared  how many prefixes there are, and how many several chains begin with or were used again
        roots, chains  how many of all prefixes have none before them, and how many ends of chains there are
        hidden_roots, hidden_blocks, hidden_bytes     what is not among those listed
        tree[]         the biggest that are shared or were used again (see --prefixes), the most used bytes first
          key          hash of its first block (hex), without the KV-cache group
          epoch, block_tokens, blocks, bytes (of all copies, on all drives and ranks), chains (that begin with it)
          start_tokens, tokens       tokens before it (null: the block before it is not here), and in it
          uses, first_uses, last_uses  of its blocks together, of its first and of its last block; null: as above
          last_use_s   0: never
          below_blocks, below_bytes  of all that follows it
          children, hidden_children  how many follow it, and how many of these are not in ``tree``
          tree[]       those that follow it
    homes[]            id, fingerprint (hex), owner ("alive" or "orphan"), clean (its last owner closed it in order;
                       false while one lives), ranks, cap_bytes, allocated_bytes, used_bytes, blocks, slots,
                       fill (used_bytes / cap_bytes), fragmentation, read_run_blocks, read_run_bytes,
                       created_s, last_use_s, oldest_stored_s, newest_stored_s,
                       index_readable, problems (sentences)
      segments[]       segment, drive (position among the home's), indexed (false: being made, or left by a crash),
                       slot_bytes (on one rank), slots, used_slots, used_bytes, fill (used_slots / slots),
                       free_slots, free_runs, longest_free_run_slots, fragmentation, read_run_blocks
        files[]        rank, length_bytes, allocated_bytes

A free run is a row of free slots, as long as it can be. ``fragmentation``: the share of free bytes that lie in runs of
less than 2 MiB on a rank, where a larger write has to be cut; null: nothing is free. ``read_run_blocks``: how many
blocks are read at a time, in the mean, when chains are read in order: a block that lies in the slot behind its parent's
is read with it. ``read_run_bytes``: the same, in bytes of one rank.

Allocated bytes are those that the file system holds, with index and control files; used bytes are those of slots that
hold blocks, each with its header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvdisk import __version__
from kvdisk.cli.block_facts import AGE_BOUNDS_S, REUSE_BOUNDS, PrefixTree
from kvdisk.cli.store_facts import (
    HomeFacts,
    NamespaceFacts,
    SegmentFacts,
    StoreFacts,
    add_classes,
    fragmentation,
    read_run_blocks,
    read_run_bytes,
    stored_range,
)

JSON_VERSION = 2


def json_head(surveyed_s: int, problems: Sequence[str]) -> dict[str, Any]:
    """Return what the objects of ``inspect`` begin with, of a store and of one block."""
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "surveyed_s": surveyed_s,
        "ok": not problems,
        "problems": list(problems),
    }


def store_as_json(facts: StoreFacts) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    return {
        **json_head(facts.surveyed_s, facts.problems),
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
        "drives": [
            drive._asdict() | {"path": None if drive.path is None else str(drive.path)} for drive in facts.drives
        ],
        "ages": _ages(facts.homes),
        "reuse": _reuse(facts.homes),
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
        "prefixes": None if namespace.tree is None else _prefixes(namespace.tree),
    }


def _prefixes(tree: PrefixTree) -> dict[str, Any]:
    roots: list[dict[str, Any]] = []
    way: list[list[dict[str, Any]]] = [roots]
    for prefix in tree.prefixes:
        found = prefix._asdict()
        del way[found.pop("depth") + 1 :]
        found["hidden_children"] = found.pop("hidden")
        found["tree"] = []
        way[-1].append(found)
        way.append(found["tree"])
    return {
        "total": tree.prefixes_total,
        "shared": tree.shared_total,
        "roots": tree.roots,
        "chains": tree.chains,
        "hidden_roots": tree.hidden_roots,
        "hidden_blocks": tree.hidden_blocks,
        "hidden_bytes": tree.hidden_bytes,
        "tree": roots,
    }


def _ages(homes: Iterable[HomeFacts]) -> dict[str, Any]:
    classes = len(AGE_BOUNDS_S) + 1
    known = [home.blocks_in_mass for home in homes if home.blocks_in_mass is not None]
    used = add_classes(mass.used for mass in known)
    return {
        "bounds_s": list(AGE_BOUNDS_S),
        "stored": list(add_classes(mass.stored for mass in known) or [0] * classes),
        "used": None if used is None else list(used[:classes]),
        "never_used": None if used is None else used[classes],
        "unknown": None if used is None else used[classes + 1],
    }


def _reuse(homes: Iterable[HomeFacts]) -> dict[str, Any]:
    reuse = add_classes(home.blocks_in_mass.reuse for home in homes if home.blocks_in_mass is not None)
    return {
        "bounds": list(REUSE_BOUNDS),
        "blocks": None if reuse is None else list(reuse[:-1]),
        "unknown": None if reuse is None else reuse[-1],
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
        "fragmentation": fragmentation(home.segments),
        "read_run_blocks": read_run_blocks(home.segments),
        "read_run_bytes": read_run_bytes(home.segments),
        "created_s": record.created_s if record else None,
        "last_use_s": record.last_use_s if record else None,
        **_stored([home]),
        "index_readable": home.tallies is not None,
        "problems": list(home.problems),
        "segments": [_segment(segment, home.ranks) for segment in home.segments],
    }


def _segment(segment: SegmentFacts, ranks: int) -> dict[str, Any]:
    layout = segment.layout
    return {
        "segment": segment.segment,
        "drive": segment.drive,
        "indexed": segment.indexed,
        "slot_bytes": segment.slot_bytes,
        "slots": segment.slots,
        "used_slots": segment.used_slots,
        "used_bytes": segment.used_bytes(ranks),
        "fill": segment.fill,
        "free_slots": layout.free_slots if layout else None,
        "free_runs": layout.free_runs if layout else None,
        "longest_free_run_slots": layout.longest_free_slots if layout else None,
        "fragmentation": segment.fragmentation,
        "read_run_blocks": segment.read_run_blocks,
        "files": [
            {"rank": file.rank, "length_bytes": file.length_bytes, "allocated_bytes": file.allocated_bytes}
            for file in segment.files
        ],
    }


def _stored(homes: Iterable[HomeFacts]) -> dict[str, int | None]:
    oldest_s, newest_s = stored_range(homes) or (None, None)
    return {"oldest_stored_s": oldest_s, "newest_stored_s": newest_s}
