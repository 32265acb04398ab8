# SPDX-License-Identifier: Apache-2.0
"""What the manager keeps of a live request. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from kvdisk.blocks import BlockKey, JobId, Tier, key_end, make_block_key, with_key_end
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import bounds
from kvdisk.manager.prefix_match import Lookups
from kvdisk.manager.reuse import Visit
from kvdisk.stats import Miss


class RequestLimits(NamedTuple):
    """What a request's user allows, in tokens; None: no limit, 0: nothing.

    ``most_load_tokens`` beyond those that are on the GPU already; ``store_limit_tokens`` from the
    prompt's start. ``load_tiers``: those that it may load from; None: all. ``tenant``: the digest
    of its salt (``kvdisk.salts``), whose share bounds what is stored; 0: it has none.
    """

    most_load_tokens: int | None = None
    store_limit_tokens: int | None = None
    load_tiers: frozenset[Tier] | None = None
    tenant: int = 0


NO_LIMITS = RequestLimits()


class KVHint(NamedTuple):
    """What a request's sender says of its blocks.

    ``action``: one of ``kv_hints.ACTIONS``. ``tokens``: of the prompt, from its start; None: all.
    ``seconds``: how long it holds, from the request's arrival and again from its end.
    """

    action: str
    tokens: int | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class BackOff:
    """How long nothing is offered after a refusal: until room came free, and some time passed.

    ``released``: the number at the last refusal. ``seconds``: how long the last one held, twice as
    long as the one before; 0: an offer was taken since, so that the next one is short again.
    """

    released: int = -1
    retry_s: float = 0.0
    seconds: float = 0.0

    def holds(self, released: int, now: float) -> bool:
        """Whether it is too early to offer anything."""
        return released <= self.released or now < self.retry_s

    def refuse(self, released: int, now: float) -> None:
        """Offers were refused. Those that are refused while it holds count as one refusal."""
        if now >= self.retry_s:
            self.seconds = bounds.OFFER_AGAIN.after(self.seconds)
        self.released = max(self.released, released)
        self.retry_s = max(self.retry_s, now + (self.seconds or bounds.OFFER_AGAIN.first_s))

    def accept(self) -> None:
        """An offer was taken: there was room. One that needs none, or is not admitted, says nothing
        of it."""
        self.seconds = 0.0


class Asked(NamedTuple):
    """A lookup that was answered, in tokens: what the GPU had, where the longest hit would have
    ended, what was promised beyond the GPU's, and how many there are in all.

    ``short``: a hit was there, and too short to be worth a load. ``now``: seconds, monotonic.
    """

    start_tokens: int
    limit_tokens: int
    promised_tokens: int
    total_tokens: int = 0
    short: bool = False
    now: float = 0.0


class RequestOutcome(NamedTuple):
    """What a request found each time it was scheduled without computed tokens, in tokens.

    ``tokens``: loaded, by tier. ``miss``: why it was not more, None: nothing was missing.
    ``asked_ago_s``: how long ago the first missing block was asked for before, None: not known.
    ``load_s``: seconds of the load, None: there was none. ``saved_s``: see ``HitCounts.loaded``.
    """

    request_id: str
    prompt_tokens: int
    total_tokens: int
    gpu_tokens: int
    tokens: Mapping[Tier, int]
    miss: Miss | None = None
    asked_ago_s: float | None = None
    load_s: float | None = None
    saved_s: float | None = None


class BlockKeys(Sequence[BlockKey]):
    """The keys of a request's full blocks of one group, made of its hashes when they are asked for:
    those of all groups of a long prompt take long to make, and few of a window's are ever needed.

    ``hashes``: those that are known; it may grow. ``hash_tokens``: what each of them covers.
    """

    __slots__ = ("_end", "_gpu_scale", "_hashes", "_scale")

    def __init__(self, hashes: Sequence[bytes], group: GroupGeometry, hash_tokens: int) -> None:
        self._hashes = hashes
        self._end = key_end(group.group)
        # Each hash covers its whole prefix, so the last one inside a block names the block.
        self._scale = group.block_tokens // hash_tokens
        self._gpu_scale = group.gpu_block_tokens // hash_tokens

    def __len__(self) -> int:
        return len(self._hashes) // self._scale

    @overload
    def __getitem__(self, at: int) -> BlockKey: ...

    @overload
    def __getitem__(self, at: slice) -> list[BlockKey]: ...

    def __getitem__(self, at: int | slice) -> BlockKey | list[BlockKey]:
        scale = self._scale
        if isinstance(at, slice):
            start, stop, step = at.start or 0, at.stop, at.step or 1
            if start < 0 or stop is None or stop < 0:
                start, stop, step = at.indices(len(self))
            assert step > 0, "from the first on"
            return with_key_end(self._hashes[(start + 1) * scale - 1 : stop * scale : step * scale], self._end)
        if at < 0:
            at += len(self)
            if at < 0:
                raise IndexError(at)
        return BlockKey(self._hashes[(at + 1) * scale - 1] + self._end)  # raises IndexError behind the last one

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self[:])

    def of(self, positions: Sequence[int]) -> list[BlockKey]:
        """Return the keys of the blocks at these positions, which ascend."""
        if len(positions) == 1:
            return [self[positions[0]]]
        if positions and positions[-1] - positions[0] == len(positions) - 1:
            return self[positions[0] : positions[-1] + 1]
        scale = self._scale
        return with_key_end([self._hashes[(at + 1) * scale - 1] for at in positions], self._end)

    def of_gpu(self, at: int) -> list[BlockKey]:
        """Return the keys that the engine knows the GPU blocks of a block by."""
        first, stop = at * self._scale, (at + 1) * self._scale
        return with_key_end(self._hashes[first + self._gpu_scale - 1 : stop : self._gpu_scale], self._end)

    def before(self, positions: Sequence[int]) -> list[BlockKey | None]:
        """Return of each of these blocks, whose positions ascend, the key of the one before it;
        None of the first."""
        if len(positions) == 1:
            return [self[positions[0] - 1] if positions[0] else None]
        found: list[BlockKey | None] = [None] if positions and not positions[0] else []
        return found + self.of([at - 1 for at in positions[len(found) :]])


@dataclass(eq=False, slots=True)
class RequestState:
    """One request between ``new_request`` and ``request_finished``.

    ``hashes``: the engine's own growing list of block hashes, one per ``hash_tokens``; read only.
    ``keys``: by group, of those that were there at the last ``update_keys``. ``arrival``: its
    number in order of arrival; the manager does not keep at what time that was. ``load_tiers``:
    those that it may load from; None: all. ``stale``: what it has computed is of weights that are
    gone, and nothing of it is stored; until it starts again.
    """

    request_id: str
    hashes: Sequence[bytes]
    prompt_tokens: int
    geometry: Geometry
    limits: RequestLimits = NO_LIMITS
    arrival: int = 0
    keys: tuple[BlockKeys, ...] = field(init=False)
    load_tiers: frozenset[Tier] | None = field(init=False)
    stale: bool = False
    counted: list[int] = field(default_factory=list)
    """By group: how many of its blocks are counted as wanted."""
    origin: list[int] = field(default_factory=list)
    """By group: what ``ReuseHistory.count`` returned for these."""
    put_off: list[object | None] = field(default_factory=list)
    """By group: the ``demand.Stretch`` before these that is counted later, if there is one."""
    visits: list[tuple[int, Visit] | None] = field(default_factory=list)
    """By group: up to where its blocks are counted as wanted at once, and as a part of what."""
    came: int | None = None
    """The time of the history of reuse, which counts blocks, as the request came; None: nothing of
    it is counted."""
    states: list[BlockKey] = field(default_factory=list)
    """Recurrent states that it wants and has not used yet."""
    lookups: Lookups = field(default_factory=Lookups)
    held_tokens: int = 0
    held_blocks: Sequence[Sequence[int]] = ()
    """Its GPU blocks by group at its last step, 0 where it needs none, and how many tokens were
    computed in them: a victim is named when they have been freed. Of a group with a window the
    engine may have taken blocks since that lie wholly before the window."""
    reached: list[int] = field(default_factory=list)
    """By group, up to where its blocks were full and computed at its last step, or before that
    where ``is_behind``."""
    is_behind: bool = False
    """Whether there are more of them than one step looks at."""
    due: list[tuple[int, int]] = field(default_factory=list)
    """Blocks that the store policy offers and no tier has taken yet, by group and position."""
    back_off: BackOff = field(default_factory=BackOff)
    """The pause after its offers were refused."""
    load_limit_tokens: int | None = None
    """No external hit reaches beyond this any more, because a load failed there; None: any may."""
    loaded: tuple[int, int] = (0, 0)
    """Tokens of which its last load has brought all blocks, and used the copies, from where to
    where."""
    loading: bool = False
    load_start_tokens: int = 0
    load_end_tokens: int = 0
    """Where its last load ends."""
    load_job: JobId | None = None
    """Its last load."""
    awaited_loads: set[JobId] = field(default_factory=set)
    """Other requests' loads that it has waited for: two that hang would have it wait in turns."""
    awaited_load: JobId | None = None
    """Another's, for whose blocks it waits, or has waited."""
    wait_started_s: float | None = None
    gave_up_waiting: bool = False
    question: int = 0
    """Ticket of what the neighbours were asked; 0: nothing."""
    remote_question: int = 0
    """The same of the remote store."""
    asked_s: float | None = None
    """When they were asked last."""
    looked_up: bool = False
    hit_tokens: dict[Tier, int] = field(default_factory=dict)
    """Tokens of the last planned load, by the tier that they come from."""
    asked: Asked | None = None
    """The last lookup, until it is known what came of it."""
    outcome: RequestOutcome | None = None
    """What came of it, while its load is out."""
    waited_since_s: float | None = None
    """When the wait that goes on began, whatever for."""
    kv_hints: tuple[KVHint, ...] = ()

    known_hashes: list[bytes] = field(default_factory=list)
    """What ``keys`` are made of: the engine may replace its own while blocks of these are held."""
    first_prompt_tokens: int = field(init=False)
    """Tokens of its prompt; of a session before it took in what was generated."""

    def __post_init__(self) -> None:
        self.first_prompt_tokens = self.prompt_tokens
        self.load_tiers = self.limits.load_tiers
        hash_tokens = self.geometry.hash_tokens
        self.keys = tuple([BlockKeys(self.known_hashes, group, hash_tokens) for group in self.geometry.groups])
        self.forget_gpu_blocks()
        self.count_anew()

    def update_keys(self) -> None:
        """Extend ``keys`` to what the engine has hashed by now: one key per full block and
        group."""
        if len(self.hashes) > len(self.known_hashes):
            self.known_hashes += self.hashes[len(self.known_hashes) :]

    def beginning(self, name: str, tokens: int) -> RequestState:
        """Return its prompt's first ``tokens`` as a request of its own, whose blocks are counted
        with this one's, and asked for by its questions."""
        hashes = self.hashes[: tokens // self.geometry.hash_tokens]
        begun = RequestState(name, hashes, tokens + 1, self.geometry, RequestLimits(tenant=self.limits.tenant))
        begun.update_keys()
        begun.counted = [len(keys) for keys in begun.keys]
        begun.question, begun.remote_question = self.question, self.remote_question
        return begun

    def parent(self, group: int, at: int) -> BlockKey | None:
        """Return the key that a block follows: the one before it in its group. A recurrent state
        follows the last of ``Geometry.beside`` that ends where it does: so they leave together."""
        own, keys = self.geometry.groups[group], self.keys
        if own.state_tokens is not None:
            tokens = (at + 1) * own.block_tokens
            for other in reversed(self.geometry.beside(group)):
                if tokens % other.block_tokens == 0:
                    return keys[other.group][tokens // other.block_tokens - 1]
        return keys[group][at - 1] if at else None

    def forget_gpu_blocks(self) -> None:
        """Its GPU blocks are gone, or may hold what is wrong: it reaches again what it computes."""
        self.held_tokens, self.held_blocks = 0, ()
        self.reached = [0] * len(self.geometry.groups)
        self.is_behind, self.loaded = False, (0, 0)
        self.due = []

    def count_anew(self) -> None:
        """What was counted of it is forgotten, or it has other keys."""
        self.counted, self.origin = ([0] * len(self.keys) for _ in range(2))
        self.visits, self.put_off = [None] * len(self.keys), [None] * len(self.keys)
        self.came = None
        self.states = []

    def limit_loads(self, tokens: int) -> None:
        """Let no hit reach beyond this position any more, because a load failed there."""
        self.load_limit_tokens = tokens if self.load_limit_tokens is None else min(tokens, self.load_limit_tokens)

    def reset_wait(self) -> None:
        """Wait anew, however the last wait ended, and for whatever load: it is preempted."""
        self._begin_wait()
        self.awaited_load = None
        self.awaited_loads.clear()

    def _begin_wait(self) -> None:
        self.wait_started_s = None
        self.gave_up_waiting = False

    def await_load(self, job_id: JobId) -> None:
        """Wait for another request's load, which is a wait of its own: the first for this load."""
        if job_id != self.awaited_load:
            self.awaited_load = job_id
            self.awaited_loads.add(job_id)
            self._begin_wait()

    def forget_changed_keys(self) -> bool:
        """Drop all keys where the engine has hashed the prompt anew; return whether it has.

        vLLM: each hash covers its whole prefix, so the last key of a group speaks for those before
        it.
        """
        for group, keys in zip(self.geometry.groups, self.keys, strict=True):
            last = len(keys) * (group.block_tokens // self.geometry.hash_tokens) - 1
            if keys and (last >= len(self.hashes) or make_block_key(self.hashes[last], group.group) != keys[-1]):
                self.known_hashes.clear()
                self.count_anew()
                self.lookups = Lookups()
                return True
        return False
