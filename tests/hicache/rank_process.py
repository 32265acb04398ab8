# SPDX-License-Identifier: Apache-2.0
"""One rank of SGLang's caches as a process: ``python -m hicache.rank_process`` with a JSON object
that says what it does. It prints a JSON line for each thing done, and ends with 1 on a wrong byte.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hicache.backends import be_patient
from hicache.trees import Tree, extra_config, prompt

PAGES = 8


def main(order: dict[str, Any]) -> None:
    be_patient()
    rank, size = order["rank"], order["size"]
    group = None
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=size)
        group = torch.distributed.group.WORLD
    extra = extra_config(Path(order["store"]), **order.get("settings", {}))
    weights = 1 if order["mla"] else 1 + rank  # a rank of MHA has heads of its own
    tree = Tree(Path(order["model"]), extra, mla=order["mla"], rank=(rank, size), group=group, weights=weights)
    for act, number in order["acts"]:
        if act == "compute":
            tree.compute(prompt(number, PAGES))
            say(computed=number)
        elif act == "load":
            say(loaded=number, tokens=tree.load(prompt(number, PAGES)))
        elif act == "commit":
            time.sleep(number)
            say(committed=True)
    say(alive=all(thread.is_alive() for thread in tree.threads))
    tree.close()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
