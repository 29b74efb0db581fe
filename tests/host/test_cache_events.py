"""Claims about events: who follows them knows what is cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from hybridkv.cache_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
    EventLog,
    from_json,
    json_schema,
    to_json,
)
from hybridkv.index_events import IndexEvents
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.token_hash import UnitHasher
from tests.event_router import ReferenceHasher, Router, cached_in, content_of
from tests.host.test_manager_random import SHAPES, make_world
from tests.host.test_prefix_index import LAYOUTS, History, plan_of
from tests.manager_steps import feed, serve
from tests.manager_world import World
from tests.models import gemma_like, limits, plan_slabs, state_and_attention
from tests.prefix_world import PrefixWorld, cache_prompt

ROOT = Path(__file__).resolve().parents[2]


class FollowedWorld(World):
    """A manager whose events a router follows: after every verb both know the same."""

    def look(self) -> None:
        super().look()
        if not hasattr(self, "router"):
            self.router = Router()
        self.router.follow(self.manager.drain_events())
        assert self.manager.index is not None
        assert (self.router.units, self.router.checkpoints) == cached_in(self.manager.index)


class FollowedPrefixes(PrefixWorld):
    """An index whose events a router follows."""

    def check(self) -> None:
        super().check()
        if not hasattr(self, "events"):
            self.events, self.router = IndexEvents(self.index), Router()
        self.router.follow(self.events.drain())
        assert (self.router.units, self.router.checkpoints) == cached_in(self.index)


def followed_world(shape: str, seed: int) -> FollowedWorld:
    """A random world with events."""
    world = make_world(shape, seed)
    options = replace(world.manager.options, prefix_caching=True, events=True)
    return FollowedWorld(world.plan, options, seed)


def gemma(num_slabs: int = 60) -> CacheManager:
    """Group 0 with a window of 6 tokens, group 1 with full attention, units of 4 tokens, events on."""
    plan = plan_slabs(gemma_like(1, 1, window=6), num_slabs, limits(max_num_seqs=4))
    return CacheManager(plan, options=ManagerOptions(events=True))


def stored(manager: CacheManager, group: int) -> list[BlocksStored]:
    """The events of what a group stored since the last call."""
    events = manager.drain_events().events
    return [event for event in events if isinstance(event, BlocksStored) and event.group_id == group]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_managers_events_tell_what_it_caches(shape: str) -> None:
    """Replaying the events of any verbs gives exactly the units and the resume points by group that the index holds."""
    num_stored, num_removed = 0, 0
    for seed in range(4):
        world = followed_world(shape, seed)
        world.run(200)
        num_stored += world.router.num_stored
        num_removed += world.router.num_removed
    assert min(num_stored, num_removed) > 3


@pytest.mark.parametrize("num_slabs", [12, 200])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_indexs_events_tell_what_it_caches(layout: str, num_slabs: int) -> None:
    """The same for evictions, lost points and lost blocks of every layout of groups."""
    world = FollowedPrefixes(plan_of(layout, num_slabs), max_per_path=2)
    History(world, 1).run(60)


def test_a_point_that_gets_its_states_later_is_reported_once() -> None:
    """Where a point with states replaces one with windows alone, only the states are new and nothing goes."""
    plan = plan_of("full_window_state")
    cached = cache_prompt(plan, 40, [])
    index, router = cached.index, Router()
    events = IndexEvents(index)
    (place,) = index.layout.windows
    position = 5 * index.unit
    first = place.first_ordinal(position) // place.per_unit * place.per_unit
    blocks = cached.pool.take([0, position // place.block_size - first, index.layout.num_state_blocks])
    window, states = np.split(blocks, [position // place.block_size - first])
    index.add_resume(int(cached.nodes[4]), position, window_blocks=[window])
    router.follow(events.drain())
    assert {group for group, _, _ in router.checkpoints} == {1}
    index.add_resume(int(cached.nodes[4]), position, window_blocks=[window], states=states)
    router.follow(events.drain())
    assert {group for group, _, _ in router.checkpoints} == {1, 2}
    index.drop_resume(index.points.all()[0])
    router.follow(events.drain())
    assert not router.checkpoints


@pytest.mark.parametrize("unit", [1, 3, 4, 64])
@pytest.mark.parametrize("salt", [None, 0, 7, -5, "tenant", "Zürich", b"\x00raw", ("tenant", 3, None), ()])
def test_the_documented_hash_is_the_hash(unit: int, salt: Hashable) -> None:
    """Plain Python that follows the documentation finds the hashes of whole units, whatever the salt and the unit."""
    tokens = np.random.default_rng(unit).integers(0, 2**31, 5 * unit).astype(np.int32)
    hasher, reference = UnitHasher(unit), ReferenceHasher(unit)
    hashes, _ = hasher.chain(hasher.start(salt), tokens, np.zeros(5, dtype=np.int32))
    assert hashes.tolist() == reference.hashes(tokens.tolist(), salt)[1:]
    assert int(hasher.start(salt)) == content_of(salt)


def test_a_router_finds_a_turns_end_by_its_own_hash() -> None:
    """The hash of all of a sequence's tokens, whole units or not, is that of the checkpoint behind it."""
    manager = gemma()
    turn = [*range(1, 12)]
    serve(manager, turn, salt="tenant")
    by_hash = {event.checkpoint_hash: event for event in stored(manager, 0)}
    event = by_hash[ReferenceHasher(4).prefix(turn, "tenant")]
    assert (event.checkpoint_position, event.token_ids, event.salt) == (11, (9, 10, 11), "tenant")
    assert manager.admit([*turn, 5], salt="tenant").num_hit_tokens == 11


def test_an_event_says_what_its_group_keeps() -> None:
    """Trunk and checkpoints come with lifecycle, window, block size, tokens and position of their group."""
    manager = gemma()
    serve(manager, [5, 6, 7, 8, 1, 2, 3, 4, 9])
    batch = manager.drain_events()
    reference = ReferenceHasher(4).hashes([5, 6, 7, 8, 1, 2, 3, 4])
    trunk = BlocksStored(
        group_id=1,
        lifecycle="full_attention",
        window_tokens=None,
        block_size=4,
        unit_tokens=4,
        start_position=0,
        hashes=tuple(reference[1:]),
        parent_hash=None,
        token_ids=(5, 6, 7, 8, 1, 2, 3, 4),
        checkpoint_position=None,
        checkpoint_hash=None,
        salt=None,
        is_portable=True,
    )
    window = replace(
        trunk,
        group_id=0,
        lifecycle="sliding_window",
        window_tokens=6,
        token_ids=(),
        checkpoint_position=8,
        checkpoint_hash=reference[2],
    )
    assert batch.events[:2] == (trunk, window)
    tails = batch.events[2:]
    assert [event.group_id for event in tails] == [0, 1]
    assert all(event.token_ids == (9,) and event.checkpoint_position == 9 for event in tails)
    # A query at 9 sees tokens 4..8: the second unit and the tail. The full group keeps the tail alone.
    assert [(event.start_position, event.hashes) for event in tails] == [(4, (reference[2],)), (8, ())]
    assert [event.parent_hash for event in tails] == [reference[1], reference[2]]


def test_states_have_no_block_size() -> None:
    """A state's event names its checkpoint and neither blocks nor a window."""
    plan = plan_slabs(state_and_attention(), 40, limits(max_num_seqs=4), {1: 4})
    manager = CacheManager(plan, options=ManagerOptions(events=True))
    serve(manager, [1, 2, 3, 4, 5])
    (event, *_) = stored(manager, 0)
    assert (event.lifecycle, event.block_size, event.window_tokens, event.hashes) == ("state", None, None, ())
    assert (event.checkpoint_position, event.checkpoint_hash) == (4, event.parent_hash)


def test_features_and_odd_salts_are_not_portable() -> None:
    """Units from the first feature on, and all under a salt without a fixed hash, are marked; those before are not."""
    manager = gemma()
    serve(manager, [*range(1, 18)], features=[(5, "image")])
    trunk = [event for event in stored(manager, 1) if event.checkpoint_hash is None]
    assert [(event.start_position, len(event.hashes), event.is_portable) for event in trunk] == [
        (0, 1, True),
        (4, 1, False),
        (8, 2, False),
    ]
    serve(manager, [*range(50, 56)], features=[(5, "image")])
    ends = {(event.checkpoint_position, event.is_portable) for event in stored(manager, 1)}
    assert ends == {(None, True), (6, False)}
    for salt, plain, is_portable in (
        (7, 7, True),
        (b"raw", None, True),
        (("a", 1), None, True),
        (("a", frozenset("b")), None, False),
        (frozenset("ab"), None, False),
    ):
        serve(manager, [1, 2, 3, 4, 5], salt=salt)
        events = stored(manager, 1)
        assert {(event.salt, event.is_portable) for event in events} == {(plain, is_portable)}
    serve(manager, [1, 2, 3, 4, 5], salt="bad \ud800 text")
    assert "bad ? text" in to_json(manager.drain_events())


def test_events_come_in_batches() -> None:
    """Units of one call are one event a sequence and group, and units that go together are one event a group."""
    manager = gemma(200)
    rows = [manager.admit([row, 1, 2]).admitted_row for row in range(4)]
    for row in rows:
        feed(manager, row, [row, 1, 2])
    manager.reserve(rows, [1] * 4)
    manager.commit(rows, [1] * 4, [3] * 4)
    for row in rows:
        manager.finish(row)
    trunk = [event for event in stored(manager, 1) if event.checkpoint_hash is None]
    assert [event.token_ids for event in trunk] == [(row, 1, 2, 3) for row in range(4)]
    serve(manager, [9] * 33)
    assert max(len(event.hashes) for event in stored(manager, 1)) == 2  # a chunk of 8 tokens
    assert manager.index is not None
    manager.index.evict(1, 100)
    removed = [event for event in manager.drain_events().events if isinstance(event, BlocksRemoved)]
    assert [len(event.hashes) for event in removed if event.checkpoint_hash is None] == [12]


def test_nothing_is_watched_unless_asked() -> None:
    """Without the option nobody watches the index, and asking for events says which option to give."""
    manager = CacheManager(plan_slabs(gemma_like(), 60))
    assert manager.index is not None
    assert manager.index.trunk.watch is None
    assert manager.index.points.watch is None
    with pytest.raises(ValueError, match=r"give ManagerOptions\(events=True\)"):
        manager.drain_events()
    with pytest.raises(ValueError, match="events: got true without prefix_caching"):
        ManagerOptions(prefix_caching=False, events=True)


def test_a_late_listener_gets_everything() -> None:
    """From scratch the batch begins with `AllCleared` and then tells all that is cached, also to who knew it before."""
    world = followed_world("window and state", 4)
    world.run(100)
    assert world.manager.index is not None
    for router in (Router(), world.router):
        batch = world.manager.drain_events(from_scratch=True)
        assert batch.events[0] == AllCleared()
        router.follow(batch)
        assert (router.units, router.checkpoints) == cached_in(world.manager.index)
    world.run(20)


def test_lost_events_are_made_up_for() -> None:
    """Where a listener is too slow, the gap in the numbers tells, and the next batch brings all that is cached."""
    world = FollowedPrefixes(plan_of("full_window_state"))
    world.check()
    world.events = IndexEvents(world.index, max_events=3)
    sizes, follow = [], world.router.follow

    def seldom(batch: EventBatch) -> None:
        sizes.append(batch.events[:1] == (AllCleared(),))
        follow(batch)

    world.router.follow = seldom  # type: ignore[method-assign]
    History(world, 2).run(60)
    assert True in sizes
    assert False in sizes


def test_a_log_keeps_so_many_events() -> None:
    """Of more events than the log keeps none is left, and their numbers are missing."""
    log = EventLog(max_events=2)
    removed = BlocksRemoved(0, "full_attention", (1,), None, None)
    for _ in range(2):
        log.add(removed)
    assert log.drain() == EventBatch(0, (removed, removed))
    for _ in range(4):
        log.add(removed)
    assert (len(log), log.has_lost) == (0, True)
    assert log.restart([removed]) == EventBatch(6, (AllCleared(), removed))
    assert log.drain() == EventBatch(8, ())
    with pytest.raises(ValueError, match="max_events: got 0"):
        EventLog(0)


def test_field_names_and_types_stay() -> None:
    """The JSON schema has exactly the documented fields; a change of it needs a new version."""
    schema = json_schema()
    definitions = schema["$defs"]
    assert isinstance(definitions, dict)
    kinds: dict[str, type[CacheEvent]] = {t.__name__: t for t in (BlocksStored, BlocksRemoved, AllCleared)}
    assert {name: set(definitions[name]["properties"]) for name in kinds} == {
        "BlocksStored": {
            "kind",
            "group_id",
            "lifecycle",
            "window_tokens",
            "block_size",
            "unit_tokens",
            "start_position",
            "hashes",
            "parent_hash",
            "token_ids",
            "checkpoint_position",
            "checkpoint_hash",
            "salt",
            "is_portable",
        },
        "BlocksRemoved": {"kind", "group_id", "lifecycle", "hashes", "checkpoint_position", "checkpoint_hash"},
        "AllCleared": {"kind"},
    }
    assert set(schema["properties"]) == {"version", "first_sequence", "events"}  # type: ignore[call-overload]
    documented = (ROOT / "docs" / "events.md").read_text()
    for kind in (*kinds.values(), EventBatch):
        assert all(f"`{field.name}`" in documented for field in fields(kind))


def test_json_is_what_it_was() -> None:
    """An event's JSON, byte by byte; large hashes are integers, unknown fields are ignored, wrong values refused."""
    batch = EventBatch(7, (BlocksRemoved(1, "sliding_window", (2**64 - 1, 3), None, None), AllCleared()))
    text = (
        '{"first_sequence":7,"events":[{"group_id":1,"lifecycle":"sliding_window","hashes":[18446744073709551615,3],'
        '"checkpoint_position":null,"checkpoint_hash":null,"kind":"blocks_removed"},{"kind":"all_cleared"}],"version":1}'
    )
    assert to_json(batch) == text
    assert from_json(text) == batch
    assert from_json(text.replace('"version":1', '"version":1,"newer":2')) == batch
    for old, new in (("[18446744073709551615,", "[18446744073709551616,"), ("sliding_window", "sliding"), (":7", ":-")):
        with pytest.raises(ValueError, match=r"first_sequence|lifecycle|hashes|JSON"):
            from_json(text.replace(old, new))
    assert json.loads(text)["events"][0]["kind"] == "blocks_removed"


PROCESS = """
from hybridkv.cache_events import to_json
from hybridkv.manager import CacheManager, ManagerOptions
from tests.manager_steps import serve
from tests.models import gemma_like, limits, plan_slabs
manager = CacheManager(plan_slabs(gemma_like(1, 1, window=6), 60, limits()), options=ManagerOptions(events=True))
for salt in (None, 3, "tenant", b"raw", ("a", None)):
    serve(manager, [*range(1, 12)], salt=salt)
print(to_json(manager.drain_events()))
"""


def test_other_processes_find_the_same_hashes() -> None:
    """Two processes with different hash seeds that cache the same send the same bytes, under every plain salt."""
    sent = [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = ['.', 'kernels']\n{PROCESS}"],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert sent[0] == sent[1] != ""


def test_models_without_full_attention_report_checkpoints() -> None:
    """Where no group keeps every unit, events tell of resume points alone."""
    world = FollowedPrefixes(plan_of("window_state"))
    History(world, 5).run(60)
    assert not world.router.units
    assert min(world.router.num_stored, world.router.num_removed) > 3
