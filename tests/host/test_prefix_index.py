"""Claims about the prefix index: what it finds, what it never hands out."""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np
import pytest

from hybridkv.errors import InvariantError
from hybridkv.index_layout import IndexLayout
from hybridkv.node_table import NodeTable
from hybridkv.plan import CachePlan
from hybridkv.prefix_index import Tail
from hybridkv.specs import ChunkedAttention, CrossAttention, LayerCache, SlidingWindow
from hybridkv.token_hash import UnitHasher
from tests.models import FULL, kv_cache, limits, model, plan_slabs, state_cache
from tests.prefix_world import CachedPrompt, PrefixWorld, cache_prompt
from tests.snapshots import snapshot

Layers = list[LayerCache | list[LayerCache]]
FULL_CACHE = kv_cache(FULL)


def window(size: int) -> LayerCache:
    """Keys and values of a layer with a sliding window."""
    return kv_cache(SlidingWindow(window=size))


def chunk(size: int) -> LayerCache:
    """Keys and values of a layer with chunks."""
    return kv_cache(ChunkedAttention(chunk=size))


LAYOUTS: dict[str, tuple[Layers, dict[int, int]]] = {
    "full": ([FULL_CACHE], {0: 2}),
    "full_window": ([FULL_CACHE, window(5)], {0: 2, 1: 2}),
    "unlike_blocks": ([FULL_CACHE, window(7)], {0: 2, 1: 3}),
    "window_and_chunk": ([FULL_CACHE, window(5), chunk(6)], {0: 4, 1: 2, 2: 4}),
    "state": ([state_cache()], {0: 1}),
    "state_full": ([state_cache(), FULL_CACHE], {0: 1, 1: 3}),
    "full_window_state": ([FULL_CACHE, window(6), state_cache()], {0: 2, 1: 4, 2: 1}),
    "window_alone": ([window(5)], {0: 3}),
    "window_state": ([window(4), state_cache()], {0: 2, 1: 1}),
    "cross": ([[kv_cache(CrossAttention(max_source_tokens=6)), FULL_CACHE]], {0: 2, 1: 2}),
}


class WeakHasher(UnitHasher):
    """Hashes of a few bits: most prefixes collide."""

    num_bits = 0

    def finish(self, states: np.ndarray) -> np.ndarray:
        return super().finish(states) & np.uint64((1 << self.num_bits) - 1)


class ThreeBitHasher(WeakHasher):
    """Eight hashes."""

    num_bits = 3


HASHERS = {"strong": None, "all_equal": WeakHasher, "three_bits": ThreeBitHasher}


def plan_of(layout: str, num_slabs: int = 200) -> CachePlan:
    """A plan of one of the layouts."""
    layers, sizes = LAYOUTS[layout]
    batch = limits(max_num_seqs=6, max_model_len=512, max_num_batched_tokens=64)
    return plan_slabs(model(*layers), num_slabs, batch, sizes)


class History:
    """A random history of a world, over two token values so that prefixes are shared all the time."""

    def __init__(self, world: PrefixWorld, seed: int) -> None:
        self.world, self.rng, self.prompts = world, random.Random(seed), [[0]]

    def run(self, num_steps: int) -> None:
        """Take random steps, check after each, look everything up at the end."""
        for _ in range(num_steps):
            getattr(
                self, self.rng.choice(["admit"] * 3 + ["decode"] * 3 + ["grow", "keep", "finish", "finish", "lose"])
            )()
            self.world.check()
            for row in [row for row in self.world.rows if len(row.tokens) > 60]:
                self.world.finish(row)
        for prompt in self.prompts[-20:]:
            for salt in (None, "x"):
                self.world.find([*prompt, 1], salt)

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, most))]

    def admit(self) -> None:
        if len(self.world.rows) < 5:
            old = self.rng.choice(self.prompts)
            prompt = (old[: self.rng.randint(0, len(old))] + self.tokens(2 * self.world.unit))[:40]
            placed = [at for at in range(3, len(prompt), 7) if self.rng.random() < 0.15]
            self.prompts.append(prompt)
            salt: Hashable = self.rng.choice([None, "x", ("x", 1)])
            self.world.admit(prompt, salt, tuple((at, self.rng.choice("ab")) for at in placed))

    def decode(self) -> None:
        rows = self.rng.sample(self.world.rows, self.rng.randint(0, len(self.world.rows)))
        for _ in range(self.rng.randint(1, self.world.unit)):
            rows = [row for row in rows if row in self.world.rows]
            self.world.decode(rows, [self.rng.randint(0, 1) for _ in rows])

    def grow(self) -> None:
        if self.world.rows:
            self.world.grow(self.rng.choice(self.world.rows), self.tokens(3 * self.world.unit))

    def keep(self) -> None:
        if self.world.rows:
            row = self.rng.choice(self.world.rows)
            self.world.grow(row, [0] * (-len(row.tokens) % self.world.unit))
            if row in self.world.rows:
                self.world.keep(row)

    def finish(self) -> None:
        if self.world.rows:
            row = self.rng.choice(self.world.rows)
            self.prompts.append(list(row.tokens))
            self.world.finish(row, keep=self.rng.random() < 0.8)

    def lose(self) -> None:
        index, cached = self.world.index, np.flatnonzero(self.world.pool.cached).tolist()
        what = self.rng.choice(["evict", "evict", "point", "blocks"])
        if what == "evict":
            self.world.evict(self.rng.randrange(len(self.world.plan.groups)), self.rng.randint(1, 6))
        elif what == "point" and index.num_resume_points:
            index.drop_resume(self.rng.choice(index.points.all()))
        elif what == "blocks" and cached:
            index.drop_blocks(np.array(self.rng.sample(cached, min(2, len(cached)))))
        self.world.forget()


@pytest.mark.parametrize("num_slabs", [12, 200])
@pytest.mark.parametrize("hasher", HASHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_histories_match_the_model(layout: str, hasher: str, num_slabs: int) -> None:
    """Whatever happened, a search finds exactly what the model says, and every block carries the prompt's own stamp."""
    for seed in range(2):
        most = random.Random(seed).choice([1, 2, 8])
        world = PrefixWorld(plan_of(layout, num_slabs), make_hasher=HASHERS[hasher], max_per_path=most)
        History(world, seed).run(50)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_histories_match_the_model(layout: str, seed: int) -> None:
    """The same over more seeds and more steps."""
    for hasher in HASHERS.values():
        for num_slabs in (12, 40, 200):
            History(PrefixWorld(plan_of(layout, num_slabs), make_hasher=hasher), seed).run(100)


# What is found


def finished(world: PrefixWorld, tokens: list[int], salt: Hashable = None, features: tuple = ()) -> None:
    """Run a prompt and end it."""
    row = world.admit(tokens, salt, features)
    assert row is not None
    world.finish(row)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "state"])
def test_one_token_is_left_to_compute(layout: str) -> None:
    """A prompt of exactly k units that is cached whole is hit up to k-1 units where a point allows, never whole."""
    world = PrefixWorld(plan_of(layout))
    unit = world.unit
    prompt = [i % 7 for i in range(4 * unit)]
    row = world.admit(prompt[: 3 * unit])
    world.keep(row)
    world.grow(row, prompt[3 * unit :])
    world.finish(row)
    assert world.find(prompt).num_hit_tokens == 3 * unit
    assert world.find([*prompt, 1]).num_hit_tokens == 4 * unit
    assert world.find([]).num_hit_tokens == world.find(prompt[:1]).num_hit_tokens == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_turn_hits_the_whole_last_turn(layout: str) -> None:
    """A conversation's next prompt hits its last turn to the token, wherever in a unit that ended."""
    world = PrefixWorld(plan_of(layout))
    turns: list[int] = []
    for turn in range(1, 5):
        turns += [turn + i % 5 for i in range(world.unit + turn)]
        assert world.find([*turns, 9]).num_hit_tokens <= len(turns)
        row = world.admit(turns)
        world.decode([row], [3])
        turns = list(row.tokens)
        world.finish(row)
        world.check()
        assert world.find([*turns, 9]).num_hit_tokens == len(turns)
        assert world.find([*turns[:-1], turns[-1] + 1, 9]).num_hit_tokens < len(turns)


def test_a_search_changes_nothing() -> None:
    """Looking up leaves index and pool as they are, whether it hits or not, under known and new salts."""
    world = PrefixWorld(plan_of("full_window_state"))
    finished(world, [1, 2, 3] * 7)
    before = snapshot([world.index.trunk.nodes, world.index.trunk.roots, world.index.points, world.pool])
    for salt in (None, "new"):
        for prompt in ([1, 2, 3] * 7 + [1], [2] * 30, [1]):
            world.find(prompt, salt)
    assert snapshot([world.index.trunk.nodes, world.index.trunk.roots, world.index.points, world.pool]) == before


def test_salts_and_features_part_prefixes() -> None:
    """Equal tokens under another salt, or with another image behind the placeholders, share nothing from there on."""
    world = PrefixWorld(plan_of("full"))
    prompt = [5] * 12
    finished(world, prompt, "a", ((4, "cat"),))
    assert world.find([*prompt, 1], "a", ((4, "cat"),)).num_hit_tokens == 12
    assert world.find([*prompt, 1], "a", ((4, "dog"),)).num_hit_tokens == 4
    assert world.find([*prompt, 1], "a", ((5, "cat"),)).num_hit_tokens == 4
    assert world.find([*prompt, 1], "a").num_hit_tokens == 4
    assert world.find([*prompt, 1], "b", ((4, "cat"),)).num_hit_tokens == 0
    assert world.find([*prompt, 1], None, ((4, "cat"),)).num_hit_tokens == 0


def test_an_image_in_the_last_part_of_a_unit_counts() -> None:
    """A tail matches only with its own image, and a unit that a prompt began with an image keeps it in its key."""
    world = PrefixWorld(plan_of("window_and_chunk"))
    cat, dog = ((5, "cat"),), ((5, "dog"),)
    finished(world, [5] * 7, None, cat)
    assert world.find([5] * 8, None, cat).num_hit_tokens == 7
    assert world.find([5] * 8, None, dog).num_hit_tokens < 5
    row = world.admit([5] * 7, None, cat)
    world.decode([row], [5])
    world.finish(row)
    assert world.find([5] * 9, None, cat).num_hit_tokens == 8
    assert world.find([5] * 9, None, dog).num_hit_tokens < 8
    assert world.find([5] * 9).num_hit_tokens < 8


def three_groups(unit: int = 50, window_tokens: int = 120) -> CachePlan:
    """Full attention, a window, states."""
    layers = [FULL_CACHE, window(window_tokens), state_cache()]
    batch = limits(max_num_seqs=2, max_model_len=8192, max_num_batched_tokens=8192)
    return plan_slabs(model(*layers), 40_000, batch, {0: unit, 1: unit, 2: 1})


def add_points(cached: CachedPrompt, with_states: list[int], windows_only: list[int]) -> None:
    """Add points of new blocks; no row holds them afterwards."""
    index, pool = cached.index, cached.pool
    (place,) = index.layout.windows
    for position in sorted(with_states + windows_only):
        first = place.first_ordinal(position)
        parts = index.layout.num_state_blocks if position in with_states else 0
        held = pool.take([0, position // place.block_size - first, parts])
        blocks, states = np.split(held, [len(held) - parts])
        point = index.add_resume(
            int(cached.nodes[position // index.unit - 1]), position, window_blocks=[blocks], states=states
        )
        assert point is not None
        pool.release(held)
    index.check()


def test_the_hit_is_what_every_group_accepts() -> None:
    """Law 9: with states at 100 and 300 and the window to be had up to 250, the hit is 100."""
    cached = cache_prompt(three_groups(), 400, [])
    add_points(cached, [100, 300], [250])
    index, prompt = cached.index, cached.tokens
    assert index.find(prompt).num_hit_tokens == 300
    # The window in front of 300 goes without the point: what a search sees of it is all that counts.
    (kept,) = [point for point in index.points.all() if point.position == 300]
    alone = kept.contents.kept_nodes[-1], kept.contents.kept_columns[-1]
    index.trunk.nodes.keeps[alone] = 0
    for _ in range(2):
        match = index.find(prompt)
        assert match.num_hit_tokens == 100
        assert match.limit().group in (1, 2)
        assert [match.shared.accepted_by(g).tolist()[-1] for g in range(3)] == [350, 250, 300]
    assert index.find(prompt[:300]).num_hit_tokens == 100


def test_one_sentence_says_what_limits_the_hit() -> None:
    """Where groups share 5,000 tokens and the states end early, the sentence names that group and the gain."""
    cached = cache_prompt(three_groups(8, 1024), 5_000, [])
    assert cached.index.find(cached.tokens).explain() == (
        "hit 0 of 5,000 shared tokens: no single group's cache ends there, several do"
    )
    add_points(cached, [4_096], [4_992])
    match = cached.index.find(cached.tokens)
    assert match.explain() == (
        "hit 4,096 of 5,000 shared tokens: the states (group 2) are kept at 4,096; without them 4,992 would be hit"
    )
    assert (match.limit().group, match.limit().num_tokens_without, match.limit().kept_at) == (2, 4_992, (4_096,))
    assert match.limit() is match.limit()
    other = cached.index.find(cached.tokens + 1)
    assert other.explain() == "hit 0 of 5,000 tokens: no cached prefix has the same first 8 tokens"


def test_a_window_can_be_the_limit_too() -> None:
    """Without states the window limits, and with everything cached only the token left to compute does."""
    layers = [FULL_CACHE, window(10)]
    batch = limits(max_num_seqs=2, max_model_len=256, max_num_batched_tokens=256)
    cached = cache_prompt(plan_slabs(model(*layers), 400, batch, 4), 64, [32])
    assert cached.index.find(cached.tokens).explain() == (
        "hit 32 of 64 shared tokens: the window of 10 tokens (group 1) is kept at 32; without it 60 would be hit"
    )
    full = cache_prompt(plan_slabs(model(FULL_CACHE), 400, batch, 4), 64, [])
    assert full.index.find(full.tokens).explain() == (
        "hit 60 of 64 shared tokens: at least one token of the prompt is left to compute"
    )
    assert full.index.find(np.append(full.tokens, 1)).explain() == "hit 64 of 64 shared tokens"


def test_collisions_are_not_cached() -> None:
    """Two prefixes of equal hash: the second is not cached until the first is gone, and is never taken for it."""
    world = PrefixWorld(plan_of("full"), make_hasher=WeakHasher)
    first, second = world.admit([1, 1, 1, 1]), world.admit([2, 2, 2, 2])
    assert world.index.num_nodes == 1
    assert [row.node > 0 for row in (first, second)] == [False, False]
    assert world.find([1, 1, 1]).num_hit_tokens == 2
    assert world.find([2, 2, 2]).num_hit_tokens == 0
    for row in (first, second):
        world.finish(row)
    world.evict(0, 1)
    finished(world, [2, 2, 2])
    assert world.find([2, 2, 2]).num_hit_tokens == 2
    assert world.find([1, 1, 1]).num_hit_tokens == 0


@pytest.mark.parametrize("hasher", HASHERS)
def test_equal_leaves_are_one_node(hasher: str) -> None:
    """Rows below one parent that fill equal units in one step get one node; the others' blocks stay their own."""
    world = PrefixWorld(plan_of("full"), make_hasher=HASHERS[hasher])
    rows = [world.admit([token]) for token in (1, 1, 1, 2)]
    world.decode(rows, [4, 4, 5, 4])
    world.check()
    if hasher == "strong":
        assert rows[0].node == rows[1].node
        assert len({row.node for row in rows}) == 3
    nodes = [row.node for row in rows if row.node]
    assert world.index.num_nodes == len(set(nodes)) or hasher != "strong"
    for row in rows:
        world.finish(row)
    world.check()


def test_a_leaf_of_equal_hash_is_not_taken() -> None:
    """A unit below the same parent with an equal hash and other tokens is neither cached nor taken for the first."""
    world = PrefixWorld(plan_of("full"), make_hasher=WeakHasher)
    first, second = world.admit([1]), world.admit([1])
    world.decode([first], [4])
    world.decode([second], [5])
    assert (first.node > 0, second.node, world.index.num_nodes) == (True, 0, 1)
    world.check()


@pytest.mark.parametrize("layout", ["full_window", "window_and_chunk"])
def test_a_hit_is_found_anywhere_on_a_long_path(layout: str) -> None:
    """The only boundary that a window accepts is found wherever on a shared path of many units it lies."""
    batch = limits(max_num_seqs=4, max_model_len=2_048, max_num_batched_tokens=64)
    layers, sizes = LAYOUTS[layout]
    cached = cache_prompt(plan_slabs(model(*layers), 4_000, batch, sizes), 1_400, [12])
    hits = {cached.index.find(cached.tokens[:length]).num_hit_tokens for length in range(13, 1_400)}
    assert hits == {12}


def test_a_tail_without_states_is_no_place_to_go_on() -> None:
    """Where states are kept, a tail that has none serves nobody, and says so."""
    cached = cache_prompt(plan_of("state_full"), 30, [])
    index, pool = cached.index, cached.pool
    held = pool.take([0, 1])
    tail = Tail(np.array([7]), [held], 0)
    assert index.add_resume(int(cached.nodes[-1]), 31, tail=tail) is not None
    pool.release(held)
    prompt = np.append(cached.tokens, [7, 7]).astype(np.int32)
    match = index.find(prompt)
    assert (match.num_hit_tokens, match.limit().group, match.limit().num_tokens_without) == (0, 0, 31)
    index.check()


# Pins, losses


def test_pinned_paths_stay() -> None:
    """Evicting gives up everything but the paths of running rows whose blocks they hold."""
    world = PrefixWorld(plan_of("full"))
    running = world.admit([1, 2, 3, 4, 5])
    finished(world, [1, 2, 9, 9, 9, 9])
    finished(world, [7] * 9)
    assert world.evict(0, 1000) > 0
    world.check()
    assert world.find([1, 2, 3, 4, 5]).num_hit_tokens == 4
    assert world.find([1, 2, 9, 9, 9]).num_hit_tokens == 2
    world.finish(running)
    world.evict(0, 1000)
    assert world.index.num_nodes == world.index.num_resume_points == len(world.index.trunk.roots) == 0
    assert not world.pool.num_cached.any()


def test_a_pin_moves_with_its_row() -> None:
    """`move_pins` is `pin` below and `unpin` above, over one unit or many; an unpin too many is refused."""
    cached = cache_prompt(plan_of("full"), 32, [])
    index, nodes = cached.index, cached.nodes
    root = np.array([index.parent[nodes[0]]])
    index.pin(np.append(root, root))
    index.move_pins(root, nodes[5:6])
    index.check()
    index.move_pins(nodes[5:6], nodes[6:7])
    index.check()
    index.move_pins(np.append(root, nodes[6:7]), np.array([nodes[6], 0], dtype=np.int32))
    index.check()
    assert index.trunk.nodes.locks[nodes[:8]].tolist() == [2] * 7 + [0]
    with pytest.raises(InvariantError, match="not below"):
        index.move_pins(nodes[6:7], nodes[2:3])
    index.unpin(nodes[[6, 6]])
    index.check()
    with pytest.raises(InvariantError, match="unpinned more often"):
        index.unpin(nodes[6:7])
    with pytest.raises(InvariantError, match="unpinned more often"):
        index.pin(np.array([900]))


def test_a_row_outlives_its_place() -> None:
    """Blocks nobody holds can always be given up, on a row's path too: its node matches nothing and is not reused."""
    world = PrefixWorld(plan_of("full"))
    first, second = world.admit([1, 2, 3, 4]), world.admit([1, 2, 3, 4])
    assert first.node == second.node
    world.finish(first, keep=False)
    assert world.evict(0, 1) >= 1
    world.check()
    assert world.index.parent[second.node] == 0
    assert world.find([1, 2, 3, 4, 5]).num_hit_tokens <= 2
    place = second.node
    world.admit([6] * 40)
    assert not world.index.trunk.nodes.live[place]
    world.decode([second], [5])
    world.decode([second], [5])
    assert second.node == 0
    world.check()


def test_roots_go_with_their_last_sequence() -> None:
    """A salt is forgotten when nothing is cached under it and no row has it, and not before."""
    world = PrefixWorld(plan_of("full"))
    row = world.admit([1], "tenant")
    assert list(world.index.trunk.roots) == ["tenant"]
    world.finish(row)
    assert world.index.num_resume_points == 1
    assert list(world.index.trunk.roots) == ["tenant"]
    world.evict(0, 1)
    assert not world.index.trunk.roots
    finished(world, [1, 2, 3], "other")
    world.index.drop_resume(world.index.points.all()[0])
    world.forget()
    world.evict(0, 9)
    assert not world.index.trunk.roots
    world.finish(world.admit([1], "third"), keep=False)
    assert not world.index.trunk.roots


@pytest.mark.parametrize("layout", ["window_alone", "window_state", "state"])
def test_nodes_that_lead_nowhere_go(layout: str) -> None:
    """Without full attention nodes own no blocks: they stay while a row or a point behind them needs them."""
    world = PrefixWorld(plan_of(layout))
    unit = world.unit
    row = world.admit([1] * 3 * unit)
    assert world.keep(row) is not None
    world.grow(row, [2] * 2 * unit)
    branch = world.admit([1] * 2 * unit + [3] * unit)
    assert world.index.num_nodes == 6
    world.finish(row, keep=False)
    assert world.index.num_nodes == 4
    world.finish(branch, keep=False)
    assert world.index.num_nodes == 3
    world.check()
    assert world.evict(0, 100) > 0
    world.check()
    assert (world.index.num_nodes, len(world.index.trunk.roots)) == (0, 0)


def test_window_blocks_stay_within_points_tails() -> None:
    """However long a sequence gets, the window blocks cached for it are those before its points, each once."""
    world = PrefixWorld(plan_of("full_window"))
    row = world.admit([1, 2] * 4)
    for _ in range(20):
        world.keep(row)
        world.grow(row, [3] * 6)
    world.finish(row)
    needed = set()
    (place,) = world.layout.windows
    for point in world.index.points.all():
        needed |= set(range(place.first_ordinal(point.position), point.position // 2))
    assert world.index.num_resume_points == 8
    assert world.pool.num_cached[1] == len(needed) < 8 * 3


def test_a_path_keeps_its_most_valuable_points() -> None:
    """Beyond `max_per_path` points the one that was used longest ago goes, on this path alone."""
    world = PrefixWorld(plan_of("full_window"), max_per_path=3)
    finished(world, [8] * 7)
    row = world.admit([1, 2, 3, 4])
    for _ in range(5):
        world.keep(row)
        if len(row.tokens) == 8:
            world.index.touch(world.find([1, 2, 3, 4, 0]))
        world.grow(row, [5, 6])
    found = sorted(point.position for point in world.index.points.all())
    assert found == [4, 7, 10, 12]
    world.check()


def test_dropped_blocks_take_what_hangs_on_them() -> None:
    """Dropping a trunk block loses its unit and all below; a window block its points; a tail's block its point."""
    world = PrefixWorld(plan_of("full_window"))
    finished(world, [1, 2, 3, 4, 5, 6, 7])
    (point,) = world.index.points.all()
    world.index.drop_blocks(point.contents.tail_blocks[0])
    world.forget()
    world.check()
    assert (world.index.num_resume_points, world.index.num_nodes) == (0, 3)
    row = world.admit([1, 2, 3, 4, 5, 6])
    assert world.keep(row) is not None
    (kept,) = world.index.points.all()
    world.index.drop_blocks(world.index.points.blocks_in(kept, 1)[:1])
    world.forget()
    world.check()
    assert (world.index.num_resume_points, world.index.num_nodes) == (0, 3)
    second_unit = world.find([1, 2, 3, 4, 5]).path[1]
    world.index.drop_blocks(world.index.trunk.nodes.blocks[second_unit, :1])
    world.forget()
    world.check()
    assert world.index.num_nodes == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moved_blocks_are_found_where_they_are(layout: str) -> None:
    """After the pool moved blocks, prefixes lead to the new ones."""
    world = PrefixWorld(plan_of(layout))
    finished(world, [1, 2, 3] * 5)
    finished(world, [1, 2, 3] * 3 + [4] * 5)
    cached = np.flatnonzero(world.pool.cached)
    groups = world.pool.offsets.searchsorted(cached, side="right") - 1
    counts = np.bincount(groups, minlength=len(world.plan.groups))
    targets = world.pool.take(counts)
    world.pool.release(targets)
    world.pool.move(cached, targets)
    world.stamps |= {int(to): world.stamps[int(at)] for at, to in zip(cached, targets, strict=True)}
    for at in cached.tolist():
        del world.stamps[at]
    world.index.replace_blocks(cached, targets)
    world.check()
    assert world.find([1, 2, 3] * 5 + [1]).num_hit_tokens == 15


# Points


def test_a_point_needs_all_its_blocks() -> None:
    """Without a block that a window needs, or below a lost node, there is no point; wrong shapes are refused."""
    cached = cache_prompt(plan_of("full_window_state"), 32, [])
    index, pool, node = cached.index, cached.pool, int(cached.nodes[3])
    (place,) = index.layout.windows
    parts = index.layout.num_state_blocks
    held = pool.take([0, 4, 2 * parts])
    blocks, states, more = np.split(held, [4, 4 + parts])
    first = place.first_ordinal(16)
    wanted = blocks[: 4 - first]
    halves = [np.array([held[0]]), np.array([pool.offsets[1]])]
    assert index.add_resume(node, 17, window_blocks=[wanted[-1:]], tail=Tail(np.array([1]), halves, 0)) is None
    missing = wanted.copy()
    missing[-1] = pool.offsets[1]
    assert index.add_resume(node, 16, window_blocks=[missing], states=states) is None
    assert index.add_resume(0, 16, window_blocks=[wanted], states=states) is None
    assert index.add_resume(node, 16, window_blocks=[wanted], states=states, tail=None) is not None
    assert index.add_resume(node, 16, window_blocks=[np.zeros_like(wanted)], states=more) is None
    index.check()
    tail = Tail(np.array([1]), [np.array([1]), np.array([1])], 0)
    for wrong in (
        {"position": 15, "window_blocks": [wanted], "states": more},
        {"position": 16, "window_blocks": [wanted[1:]], "states": more},
        {"position": 16, "window_blocks": [], "states": more},
        {"position": 16, "window_blocks": [wanted], "states": np.append(more, more)},
        {"position": 16, "window_blocks": [wanted], "states": more, "tail": tail},
        {"position": 17, "window_blocks": [wanted], "states": more, "tail": Tail(tail.tokens, [tail.blocks[0]], 0)},
    ):
        with pytest.raises(ValueError, match="got"):
            index.add_resume(node, **wrong)
    pool.release(held)
    index.check()


def test_a_point_gets_its_states_later() -> None:
    """A point with windows alone gives way to an equal one with states, which needs no window blocks of its own."""
    cached = cache_prompt(three_groups(), 400, [])
    index, pool = cached.index, cached.pool
    add_points(cached, [], [200])
    assert cached.hit() == 0
    states = pool.take([0, 0, index.layout.num_state_blocks])
    (place,) = index.layout.windows
    nothing = np.zeros(4 - place.first_ordinal(200), dtype=np.int64)
    point = index.add_resume(int(cached.nodes[3]), 200, window_blocks=[nothing], states=states)
    pool.release(states)
    index.check()
    assert (index.num_resume_points, cached.hit()) == (1, 200)
    assert index.find(np.append(cached.tokens, 1)).resume is point
    index.drop_resume(point)
    index.drop_resume(point)
    index.check()
    assert not pool.num_cached[1:].any()


def test_blocks_that_nobody_holds_are_refused() -> None:
    """A chain of free blocks, or of blocks that another prefix has, changes nothing."""
    cached = cache_prompt(plan_of("full"), 8, [])
    index, pool = cached.index, cached.pool
    tokens, keys = np.zeros((2, 2), dtype=np.int32), np.zeros(2, dtype=np.int32)
    hashes, _ = index.hasher.chain(index.hasher.start("new"), tokens, keys)
    root = index.root_of("new")
    free = pool.take([2])
    pool.release(free)
    taken = index.trunk.nodes.blocks[cached.nodes[:2]]
    for blocks in (free.reshape(2, 1), taken):
        with pytest.raises(InvariantError):
            index.add_chain(root, hashes, tokens, keys, blocks)
        index.check()
    assert index.num_nodes == 4


# Parts


def test_the_layout_has_one_unit_for_all_groups() -> None:
    """The unit is the least common multiple of the block sizes, 64 where no group has tokens."""
    layout = IndexLayout.of(plan_of("window_and_chunk"))
    assert (layout.unit, layout.full, layout.windowed, layout.states) == (4, (0,), (1, 2), ())
    assert [(place.group_id, place.per_unit, place.first_column) for place in layout.places] == [
        (0, 1, 0),
        (1, 2, 1),
        (2, 1, 3),
    ]
    assert IndexLayout.of(plan_of("unlike_blocks")).unit == 6
    states = IndexLayout.of(plan_of("state"))
    assert (states.unit, states.states, states.places, states.num_full_columns) == (64, (0,), (), 0)
    assert IndexLayout.of(plan_of("cross")).token_groups == (1,)


@pytest.mark.parametrize("num_bits", [5, 64])
def test_the_hash_table_is_a_dictionary(num_bits: int) -> None:
    """Over insertions and removals, few and many at a time, it answers as a dictionary does."""
    rng, table, known, next_node = np.random.default_rng(0), NodeTable(), {}, 1
    for step in range(300):
        count = int(rng.integers(1, 200 if step % 3 else 20))
        # Hashes that begin alike probe long runs.
        values = rng.integers(0, 2**63, count, dtype=np.uint64) << np.uint64(64 - num_bits)
        if num_bits < 64:
            values = rng.choice(2**20, count, replace=False).astype(np.uint64) << np.uint64(num_bits)
        values = np.array([value for value in set(values.tolist()) if value not in known], dtype=np.uint64)
        nodes = np.arange(next_node, next_node + len(values), dtype=np.int32)
        next_node += len(values)
        table.insert(values, nodes)
        known |= dict(zip(values.tolist(), nodes.tolist(), strict=True))
        if step % 2:
            gone = rng.choice(np.array(list(known), dtype=np.uint64), len(known) // 2, replace=False)
            table.remove(np.array([known.pop(value) for value in gone.tolist()], dtype=np.int32))
            assert not table.look_up(gone).any()
        asked = np.array(list(known), dtype=np.uint64)
        assert table.look_up(asked).tolist() == list(known.values())
        assert [table.get(value) for value in list(known)[:9]] == list(known.values())[:9]
        assert len(table) == len(known)


def test_paths_are_found_whatever_their_numbers() -> None:
    """Sequences that grew side by side, so that no two units of one follow each other by number, are found whole."""
    batch = limits(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=64)
    world = PrefixWorld(plan_slabs(model(FULL_CACHE), 2000, batch, 2))
    rows = [world.admit([token, 0]) for token in range(3)]
    for step in range(240):
        world.decode(rows, [step % 5, step % 3, step % 7])
    of = world.index.trunk.nodes
    for row in rows:
        match = world.index.find(np.array([*row.tokens, 1], dtype=np.int32))
        assert match.num_hit_tokens == len(row.tokens)
        line, node = [], row.node
        while node:
            line.append(node)
            node = int(of.parent[node])
        assert of.lineage(row.node).tolist() == line[::-1]
        assert match.path.tolist() == line[-2::-1]
    world.index.check()


def test_the_numbers_of_lost_features_do_not_pile_up() -> None:
    """Images that are looked up and never cached are forgotten again."""
    index = cache_prompt(plan_of("full"), 8, []).index
    for image in range(20_000):
        index.find(np.array([1, 2], dtype=np.int32), None, ((0, image),))
    assert len(index._keys._keys) < 13_000
