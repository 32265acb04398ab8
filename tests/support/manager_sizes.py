# SPDX-License-Identifier: Apache-2.0
"""The tiny managers that the state machine runs over: by tiers, KV-cache groups, admission and
store policy."""

from __future__ import annotations

from dataclasses import replace

from kvdisk.blocks import Tier
from kvdisk.config import EVICTIONS, Config
from kvdisk.geometry import Geometry, GroupGeometry, in_units
from support.manager_parts import Sizes, two_tiers

RANKS = 2

_ONE_GROUP = Geometry((GroupGeometry(0, 2, 4096),), RANKS, 2)
_TWO_GROUPS = Geometry((GroupGeometry(0, 4, 8192), GroupGeometry(1, 2, 4096, window_tokens=4)), RANKS, 2)
_UNITS = Geometry(in_units((GroupGeometry(0, 2, 4096),), 4), RANKS, 2)
_WINDOW_UNITS = Geometry(in_units((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 2048, window_tokens=8)), 4), RANKS, 2)
_PROMPTS = ("aab", "aabb", "aabbt", "aabbcc", "aabbcct", "aabbddt", "eet", "eefft")
_QUEUED = ("aabbt", "aabbccddt", "eeffgghht", "aabbiikkt", "llmmoott", "eefft")
_LONG_PROMPTS = ("aabbt", "aabbccddt", "aabbccdd", "aabbeefft", "gghht", "aabbcct")


def _config(**changes: object) -> Config:
    # It never becomes quiet because nothing was heard for long.
    return two_tiers(**({"nvme_admission": "all", "io_deadline_s": 1e9} | changes))


ONE_GROUP = Sizes(_ONE_GROUP, _config(), 7, (2,), (2,), 2, _PROMPTS)
WINDOW = Sizes(_TWO_GROUPS, _config(), 10, (2, 2), (2, 2), 2, _LONG_PROMPTS, most_outputs=2)
REUSE = Sizes(_ONE_GROUP, _config(nvme_admission="reuse(2)"), 7, (2,), (3,), 2, _PROMPTS)
REUSE_CPU = Sizes(_ONE_GROUP, _config(cpu_admission="reuse(2)", store_decode=True), 7, (3,), (2,), 1, _PROMPTS)
NVME_ONLY = Sizes(_ONE_GROUP, _config(cpu_bytes=0), 7, (), (2,), 2, _PROMPTS)
NVME_REUSE = Sizes(_ONE_GROUP, _config(cpu_bytes=0, nvme_admission="reuse(2)"), 7, (), (2,), 2, _PROMPTS)
LEARNED = Sizes(_ONE_GROUP, _config(nvme_admission="learned"), 7, (2,), (2,), 2, _PROMPTS)
_TWO_BLOCKS_AN_HOUR = {"nvme_write_bytes_per_day": 48 * RANKS * _ONE_GROUP.slot_sizes[0]}
_TWO_LARGE_BLOCKS_AN_HOUR = {"nvme_write_bytes_per_day": 48 * RANKS * max(_TWO_GROUPS.slot_sizes)}
BUDGET = Sizes(_ONE_GROUP, _config(**_TWO_BLOCKS_AN_HOUR), 7, (2,), (3,), 2, _PROMPTS)
NVME_BUDGET = Sizes(_ONE_GROUP, _config(cpu_bytes=0, **_TWO_BLOCKS_AN_HOUR), 7, (), (2,), 2, _PROMPTS)
CPU_ONLY = Sizes(_ONE_GROUP, _config(store_dirs=(), nvme_bytes=None), 7, (2,), (), 0, _PROMPTS, zeroes=True)
_REMOTE = {"remote": "s3://nowhere", "remote_admission": "all"}
REMOTE = Sizes(_ONE_GROUP, _config(**_REMOTE, store_decode=True), 7, (3,), (3,), 2, _PROMPTS)
REMOTE_REUSE = Sizes(_ONE_GROUP, _config(**_REMOTE | {"remote_admission": "reuse(2)"}), 7, (3,), (2,), 2, _PROMPTS)
REMOTE_WINDOW = Sizes(
    _TWO_GROUPS, _config(**_REMOTE, cpu_admission="reuse(2)"), 10, (3, 3), (2, 2), 2, _LONG_PROMPTS, 2
)
REMOTE_ONLY = Sizes(_ONE_GROUP, _config(store_dirs=(), nvme_bytes=None, **_REMOTE), 7, (4,), (), 0, _PROMPTS)
REMOTE_QUEUE = Sizes(
    _ONE_GROUP, _config(store_dirs=(), nvme_bytes=None, **_REMOTE), 7, (6,), (), 0, _QUEUED, most_running=1, stored=3
)
REMOTE_NVME = Sizes(_ONE_GROUP, _config(cpu_bytes=0, **_REMOTE), 7, (), (3,), 2, _PROMPTS)
REMOTE_NVME_QUEUE = Sizes(
    _TWO_GROUPS, _config(cpu_bytes=0, **_REMOTE), 10, (), (6, 6), 2, _QUEUED, 2, most_running=1, stored=3
)
ON_PREEMPTION = Sizes(_ONE_GROUP, _config(store_policy="on_preemption"), 6, (4,), (2,), 2, _PROMPTS)
ON_PREEMPTION_WINDOW = Sizes(
    _TWO_GROUPS, _config(store_policy="on_preemption"), 10, (3, 3), (2, 2), 2, _LONG_PROMPTS, 2, zeroes=True
)
ON_PREEMPTION_NVME = Sizes(
    _ONE_GROUP, _config(store_policy="on_preemption", cpu_bytes=0), 6, (), (3,), 2, _PROMPTS, zeroes=True
)
SPILLOVER = Sizes(_ONE_GROUP, _config(store_policy="spillover"), 8, (3,), (2,), 2, _PROMPTS)
SPILLOVER_REUSE = Sizes(
    _ONE_GROUP, _config(store_policy="spillover", cpu_admission="reuse(2)"), 8, (2,), (2,), 2, _PROMPTS
)
SPILLOVER_WINDOW = Sizes(_TWO_GROUPS, _config(store_policy="spillover"), 12, (2, 2), (2, 2), 2, _LONG_PROMPTS, 2)
QUEUE = Sizes(_ONE_GROUP, _config(lookup_wait_s=0.5), 7, (4,), (6,), 2, _QUEUED, most_running=1, stored=3)
QUEUE_WINDOW = Sizes(_TWO_GROUPS, _config(), 10, (4, 4), (6, 6), 2, _QUEUED, 2, most_running=1, stored=3)
QUEUE_REUSE = Sizes(_ONE_GROUP, _config(cpu_admission="reuse(3)"), 7, (4,), (6,), 2, _QUEUED, most_running=1, stored=3)
ON_PREEMPTION_QUEUE = Sizes(
    _TWO_GROUPS,
    _config(store_policy="on_preemption", nvme_admission="learned", **_TWO_LARGE_BLOCKS_AN_HOUR),
    *(10, (4, 4), (6, 6), 2, _QUEUED, 2),
    zeroes=True,
    most_running=2,
    stored=3,
)
SPILLOVER_QUEUE = Sizes(
    _TWO_GROUPS,
    _config(store_policy="spillover", cpu_admission="learned", **_TWO_LARGE_BLOCKS_AN_HOUR),
    *(12, (4, 4), (6, 6), 2, _QUEUED, 2),
    most_running=1,
    stored=3,
)
_TENANTS = ("aab", "aabbt", "aabbcct", "aaddt", "eefft", "eegg", "ggt", "AAbbt")
"""The first letter says whose a prompt is; that of a capital is nobody's."""
SHARE = Sizes(_ONE_GROUP, _config(salt_share=0.5), 7, (4,), (3,), 2, _TENANTS)
SHARE_WINDOW = Sizes(_TWO_GROUPS, _config(salt_share=0.5), 10, (4, 4), (3, 3), 2, _TENANTS, most_outputs=2)
SHARE_NVME = Sizes(_ONE_GROUP, _config(salt_share=0.3, cpu_bytes=0), 7, (), (4,), 2, _TENANTS)
SHARE_SPILLOVER = Sizes(
    _ONE_GROUP, _config(salt_share=0.5, store_policy="spillover", eviction="learned"), 8, (4,), (4,), 2, _TENANTS
)
SHARE_QUEUE = Sizes(
    _ONE_GROUP, _config(salt_share=0.4, **_REMOTE), 7, (6,), (6,), 2, (*_QUEUED, *_TENANTS), most_running=1, stored=3
)
SHARE_SIZES = (SHARE, SHARE_WINDOW, SHARE_NVME, SHARE_SPILLOVER, SHARE_QUEUE)
SPILLOVER_NVME = Sizes(
    _ONE_GROUP, _config(store_policy="spillover", cpu_bytes=0, **_TWO_BLOCKS_AN_HOUR), 8, (), (3,), 2, _PROMPTS
)
_WHOLE_UNITS = ("aabb", "aabbt", "aabbccddt", "aabbcc", "aabbccddeefft", "gghhiijjt", "gghht", "kkllmmnnoot")
UNITS = Sizes(_UNITS, _config(), 14, (3,), (2,), 2, _WHOLE_UNITS)
UNITS_NVME = Sizes(_UNITS, _config(cpu_bytes=0, store_decode=True), 14, (), (3,), 2, _WHOLE_UNITS, 4, zeroes=True)
UNITS_WINDOW = Sizes(_WINDOW_UNITS, _config(store_decode=True), 20, (3, 3), (2, 2), 2, _WHOLE_UNITS, 5)
UNITS_REMOTE = Sizes(_WINDOW_UNITS, _config(**_REMOTE, cpu_admission="reuse(2)"), 20, (3, 3), (2, 2), 2, _WHOLE_UNITS)
UNITS_ON_PREEMPTION = Sizes(
    _UNITS, _config(store_policy="on_preemption"), 12, (4,), (2,), 2, _WHOLE_UNITS, 4, zeroes=True
)
UNITS_QUEUE = Sizes(
    _WINDOW_UNITS, _config(lookup_wait_s=0.5), 20, (4, 4), (6, 6), 2, _WHOLE_UNITS, 2, most_running=1, stored=3
)
UNITS_SPILLOVER = Sizes(_UNITS, _config(store_policy="spillover"), 10, (3,), (2,), 2, _WHOLE_UNITS)
UNITS_SPILLOVER_WINDOW = Sizes(_WINDOW_UNITS, _config(store_policy="spillover"), 20, (3, 3), (2, 2), 2, _WHOLE_UNITS, 3)
UNIT_SPILLOVER_SIZES = (UNITS_SPILLOVER, UNITS_SPILLOVER_WINDOW)
UNIT_SIZES = (
    *(UNITS, UNITS_NVME, UNITS_WINDOW, UNITS_REMOTE, UNITS_ON_PREEMPTION, UNITS_QUEUE),
    *UNIT_SPILLOVER_SIZES,
)
"""Two of the engine's blocks are one of kvdisk's."""
_MEMORY_OR_ALL = (frozenset({Tier.CPU}), None)
_STATES = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096, window_tokens=2, state_tokens=2)), RANKS, 2)
"""Recurrent states, which have slots of the same size as the KV beside them."""
STATES = Sizes(_STATES, _config(store_decode=True), 14, (5,), (4,), 2, _PROMPTS)
STATES_SPILLOVER = Sizes(
    _STATES, _config(salt_share=0.5, store_policy="spillover"), 12, (6,), (4,), 2, _TENANTS, load_tiers=_MEMORY_OR_ALL
)
LIMITED = Sizes(_ONE_GROUP, _config(), 6, (3,), (3,), 2, _PROMPTS, load_tiers=_MEMORY_OR_ALL)
AGES = Sizes(_ONE_GROUP, _config(**_REMOTE, max_age_s=2.0), 7, (3,), (3,), 2, _PROMPTS, load_tiers=_MEMORY_OR_ALL)
"""Requests that may load from memory alone, and blocks that grow too old."""
EVICTION_SIZES = {
    f"{kind}, {name}": replace(sizes, config=replace(sizes.config, eviction=name))
    for name in EVICTIONS
    if name != "lru"  # all others have that
    for kind, sizes in (("ONE_GROUP", ONE_GROUP), ("WINDOW", WINDOW))
}
"""Every other eviction policy, by its name: one that is added to ``EVICTIONS`` runs here too."""
_LONG = ("aabbccddeeffgghht", "aabbccddeeffgghhii", "aabbccddjjkkllmmt", "nnooppqqrrsstt", "aabbt", "uuvvwwxxyyzzaabbt")
LONG_SIZES = {
    "one group": replace(ONE_GROUP, block_count=20, cpu_slots=(10,), segment_slots=(6,), segments=2, prompts=_LONG),
    "two groups": replace(WINDOW, block_count=32, cpu_slots=(6, 10), segment_slots=(4, 6), segments=2, prompts=_LONG),
    "queue": replace(QUEUE, block_count=20, cpu_slots=(12,), segment_slots=(8,), segments=2, prompts=_LONG),
    "remote": replace(REMOTE, block_count=20, cpu_slots=(10,), segment_slots=(6,), segments=2, prompts=_LONG),
    "NVMe alone": replace(NVME_ONLY, block_count=20, segment_slots=(6,), segments=2, prompts=_LONG),
    "ages": replace(AGES, block_count=20, cpu_slots=(12,), segment_slots=(6,), segments=2, prompts=_LONG),
    "shares": replace(SHARE_SPILLOVER, block_count=20, cpu_slots=(10,), segment_slots=(6,), segments=2, prompts=_LONG),
}
"""For steps with low bounds. In "remote" one chain fills the NVMe tier. Its tail alone may leave
there: what memory has just written to get room."""
LONG_VICTIMS = {
    "victims": replace(ON_PREEMPTION, block_count=20, cpu_slots=(10,), segment_slots=(6,), segments=2, prompts=_LONG),
    "victims with a window": replace(
        ON_PREEMPTION_WINDOW, block_count=32, cpu_slots=(6, 10), segment_slots=(4, 6), segments=2, prompts=_LONG
    ),
    "victims in units": replace(
        UNITS_ON_PREEMPTION, block_count=24, cpu_slots=(10,), segment_slots=(6,), segments=2, prompts=_LONG
    ),
}
"""For steps with low bounds, where requests are preempted and saved."""
QUEUE_SIZES = (QUEUE, QUEUE_WINDOW, QUEUE_REUSE)
"""Requests wait in line, and are read ahead for."""
ADMISSION_SIZES = (REUSE, REUSE_CPU, NVME_REUSE, LEARNED, BUDGET, NVME_BUDGET)
ON_COMPUTE_SIZES = (
    *(ONE_GROUP, WINDOW, REUSE, REUSE_CPU, NVME_ONLY, NVME_REUSE, LEARNED, BUDGET, NVME_BUDGET, CPU_ONLY),
    *QUEUE_SIZES,
)
ON_PREEMPTION_SIZES = (ON_PREEMPTION, ON_PREEMPTION_WINDOW, ON_PREEMPTION_NVME)
SPILLOVER_SIZES = (SPILLOVER, SPILLOVER_REUSE, SPILLOVER_WINDOW)
