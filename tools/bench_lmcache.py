# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind LMCache beside LMCache's own file adapter, ``fs_native``, by LMCache's own bench of
adapters: how fast objects are stored and loaded, in alternating pairs.

    PYTHONPATH=.venv-engines/lmcache .venv-engines/bin/python tools/bench_lmcache.py --dir DIR

Each run is ``lmcache bench l2 --no-skip-verify``, in a process of its own, over an empty directory:
what it stores it loads again, and compares. ``fs_native`` gets ``use_odirect``, so that neither
reads from the page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ALIGN_BYTES = 4096
KINDS = ("kvdisk", "fs_native")


def option_for(kind: str, folder: Path, nvme_bytes: str | int, **more: Any) -> str:
    """Return what a user writes after ``--l2-adapter``. ``more``: of kvdisk's settings."""
    if kind == "fs_native":
        return json.dumps({"type": kind, "base_path": str(folder), "use_odirect": True})
    settings = {"store_dirs": str(folder), "nvme_bytes": nvme_bytes, "nvme_admission": "all", **more}
    parameters = {"models": {"bench-model": {"weights_name": "no weights"}}, "kvdisk": settings}
    plugin = {"type": "plugin", "module_path": "kvdisk.lmcache", "class_name": "L2Adapter"}
    return json.dumps(plugin | {"adapter_params": parameters})


def measure(kind: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return MB a second of stores and loads, by LMCache's own figures. Raises RuntimeError where
    it does not verify what it has loaded."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = folder.with_suffix(".json")
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify", "--format", "json"]
    command += ["--num-keys", str(arguments.keys), "--in-flight", str(arguments.in_flight)]
    command += ["--rounds", str(arguments.rounds), "--data-size-kb", str(arguments.kib)]
    command += ["--l1-align-bytes", str(ALIGN_BYTES), "--output", str(told)]
    command += ["--l2-adapter", option_for(kind, folder, arguments.nvme_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    keys = arguments.keys * arguments.in_flight
    if done.returncode != 0 or f"All {keys} keys data verified OK." not in done.stdout:
        raise RuntimeError(f"{kind} did not verify:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = speeds_in(json.loads(told.read_text()), keys * arguments.rounds)
    shutil.rmtree(folder)
    told.unlink()
    return found


def speeds_in(told: Any, keys: int) -> dict[str, float]:
    """Return the speeds in LMCache's report. Raises RuntimeError where not all has come."""
    found = {}
    for section in told["metrics"].values():
        if isinstance(section, dict) and section.get("operation") in {"Store", "Load"}:
            if section["total_success"] != keys:
                raise RuntimeError(f"{section['total_success']} of {keys} objects have come: {section}")
            found[section["operation"].lower()] = float(section["throughput_avg_mbps"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--keys", type=int, default=16, help="objects of a task")
    parser.add_argument("--in-flight", type=int, default=4, help="tasks at once")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kib", type=int, default=8192, help="of an object")
    parser.add_argument("--nvme-bytes", default="16GiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder, rows = arguments.dir / "bench-lmcache", []
    for pair in range(arguments.pairs):
        kinds = KINDS if pair % 2 else KINDS[::-1]
        row: dict[str, Any] = {kind: measure(kind, folder / kind, arguments) for kind in kinds}
        for what in ("store", "load"):
            row[f"{what}_ratio"] = row["kvdisk"][what] / row["fs_native"][what]
        rows.append(row)
        print(json.dumps({"pair": pair, **row}), flush=True)
    for what in ("store", "load"):
        ratios = [row[f"{what}_ratio"] for row in rows]
        print(f"{what}: {statistics.median(ratios):.2f} of fs_native (lowest {min(ratios):.2f})")
    shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
