"""A small engine over real cache memory in which every byte says whose it is.

`World` writes a stamp (request, group, layer, position) for every token and every state it computes, through the same
slots and views that a model's kernels use, then reads every live token of every request back. A stamp of somebody else
is corruption.
"""

import numpy as np
import torch

from hybridkv import (
    BatchLimits,
    CacheManager,
    CacheTensor,
    ChunkedAttention,
    FullAttention,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    State,
    Verdict,
    plan_cache,
)
from hybridkv.arena import Arena, ArenaLayout
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.retention import first_needed_token
from hybridkv_kernels.constants import PAD_SLOT_ID

LIFECYCLES = (FullAttention(), SlidingWindow(window=7), ChunkedAttention(chunk=12), State(family="mamba2"))
BLOCK_SIZES = (4, 3, 8, 1)
LIMITS = BatchLimits(max_num_seqs=5, max_model_len=60, max_num_batched_tokens=40)
MAX_GROWTH = 8


class ForeignStampError(AssertionError):
    """A request found a stamp that is not its own."""


def world_spec(num_groups: int) -> ModelSpec:
    """Two layers for each of the first `num_groups` lifecycles; every token or state stores a four-number stamp."""
    layers = []
    for group in range(num_groups):
        lifecycle = LIFECYCLES[group]
        kind = "per_sequence" if lifecycle.kind == "state" else "per_token"
        # A state as large as a block of tokens, so that the planner splits the two states over their layers.
        shape = (16, 4) if kind == "per_sequence" else (1, 4)
        tensor = CacheTensor(name="stamp", kind=kind, shape=shape, dtype="float32")
        cache = LayerCache(lifecycle=lifecycle, tensors=(tensor,))
        layers += [LayerSpec(layer=2 * group + i, caches=(cache,)) for i in range(2)]
    return ModelSpec(name="world", model_type="world", layers=tuple(layers))


class World:
    """Requests that admit, grow, are preempted, resume, move and finish over 2-4 groups."""

    def __init__(self, num_groups: int = 4, num_slabs: int = 24, layout: ArenaLayout = "slab") -> None:
        spec = world_spec(num_groups)
        sizes = dict(enumerate(BLOCK_SIZES[:num_groups]))
        slab_bytes = plan_cache(spec, 2**24, LIMITS, block_size=sizes).slab_bytes
        self.plan = plan_cache(spec, num_slabs * slab_bytes, LIMITS, block_size=sizes)
        self.arena = Arena(self.plan, layout=layout)
        self.manager = CacheManager(self.plan)
        self.tables = MultiGroupBlockTable.from_plan(self.plan, tables=self.manager.tables)
        self._parts = {tensor.layer: tensor.part for group in self.plan.groups for tensor in group.tensors}
        self.rows: dict[int, int] = {}
        self.preempted: set[int] = set()
        self.num_requests = 0

    @property
    def running(self) -> list[int]:
        """Requests that hold blocks or may reserve some."""
        return [request for request in self.rows if request not in self.preempted]

    def admit(self) -> None:
        """Give a new request a row, if one is free."""
        if self.manager.num_free_rows:
            self.rows[self.num_requests] = self.manager.admit(1)
            self.num_requests += 1

    def grow(self, requests: list[int], amounts: list[int]) -> None:
        """Compute tokens for some requests in one step; those that do not fit wait."""
        wanted = [
            (request, min(amount, LIMITS.max_model_len - self.computed(request)))
            for request, amount in zip(requests, amounts, strict=True)
        ]
        wanted = [(request, amount) for request, amount in wanted if amount > 0]
        rows = [self.rows[request] for request, _ in wanted]
        amounts = [amount for _, amount in wanted]
        num_ok = self.manager.reserve(rows, amounts).num_ok
        if num_ok:
            self._compute([request for request, _ in wanted[:num_ok]], amounts[:num_ok])

    def preempt(self, request: int) -> None:
        """Take a request's blocks away."""
        self.manager.preempt(self.rows[request])
        self.preempted.add(request)

    def resume(self, request: int, num_tokens: int) -> None:
        """Let a preempted request start over, if its first tokens fit."""
        if self.manager.resume(self.rows[request], num_tokens) is Verdict.OK:
            self.preempted.remove(request)
            self._compute([request], [num_tokens])

    def finish(self, request: int) -> None:
        """End a request."""
        self.manager.finish(self.rows.pop(request))
        self.preempted.discard(request)

    def move(self, request: int) -> None:
        """Move a request to the highest free row, if one is free."""
        free = sorted(set(range(LIMITS.max_num_seqs)) - set(self.rows.values()))
        if free:
            self.manager.move_row(self.rows[request], free[-1])
            self.rows[request] = free[-1]

    def computed(self, request: int) -> int:
        """Tokens of a request that are in the cache."""
        return int(self.manager.num_computed_tokens[self.rows[request]])

    def check(self) -> None:
        """Check the accounting, the tables on both sides and every live stamp of every request."""
        self.manager.check()
        self.tables.commit()
        for group, table in enumerate(self.manager.tables):
            assert np.array_equal(self.tables.block_table_cpu(group), table.entries[:, : table.width])
        for request in self.running:
            if self.computed(request):
                self._check_request(request)
        assert not self._null_block_bytes().any(), "the null block was written"

    def _compute(self, requests: list[int], amounts: list[int]) -> None:
        rows = [self.rows[request] for request in requests]
        before = self.manager.num_computed_tokens[rows]
        step = self.tables.step(rows, amounts, before, num_tokens_padded=LIMITS.max_num_batched_tokens)
        slots, positions = step.slot_mapping.numpy(), step.geometry.positions_cpu[: step.geometry.num_tokens]
        owners = np.repeat(requests, amounts)
        for group in self.plan.groups:
            group_id = group.group.group_id
            for cache in group.group.caches:
                if group.group.is_state:
                    stamps = self._stamps(np.array(requests), group_id, cache.layer, before + amounts)
                    self._write_states(cache.layer, self._state_blocks(step, group_id, cache.layer), stamps)
                else:
                    stamps = self._stamps(owners, group_id, cache.layer, positions)
                    self._write_tokens(cache.layer, slots[group_id], stamps, group.block_size)
        self.manager.commit(rows, amounts)

    def _check_request(self, request: int) -> None:
        computed, step = self.computed(request), LIMITS.max_num_batched_tokens
        for start in range(0, computed, step):
            self._check_tokens(request, start, min(step, computed - start))

    def _check_tokens(self, request: int, start: int, count: int) -> None:
        row, computed = self.rows[request], self.computed(request)
        tables_step = self.tables.step([row], [count], [start])
        positions, slots = tables_step.geometry.positions_cpu, tables_step.slot_mapping.numpy()
        for group in self.plan.groups:
            group_id, lifecycle = group.group.group_id, group.group.lifecycle
            first = int(first_needed_token(lifecycle, np.array([computed]))[0])
            for cache in group.group.caches:
                view = self.arena.view(cache.layer, "stamp")
                if group.group.is_state:
                    found = view[int(self._state_blocks(tables_step, group_id, cache.layer)[0])].numpy()[:1]
                    expected = self._stamps(np.array([request]), group_id, cache.layer, np.array([computed]))
                else:
                    live = positions >= first
                    live_slots = slots[group_id][live]
                    assert (live_slots >= 0).all(), f"a live token of request {request} has no slot in group {group_id}"
                    blocks, offsets = live_slots // group.block_size, live_slots % group.block_size
                    found = view[torch.from_numpy(blocks), torch.from_numpy(offsets)].numpy().reshape(-1, 4)
                    expected = self._stamps(np.full(live.sum(), request), group_id, cache.layer, positions[live])
                if not np.array_equal(found, expected):
                    wrong = np.flatnonzero((found != expected).any(axis=1))[0]
                    raise ForeignStampError(f"row {row} group {group_id}: found {found[wrong]}, not {expected[wrong]}")

    def _write_tokens(self, layer: int, slots: np.ndarray, stamps: np.ndarray, block_size: int) -> None:
        written = slots[: len(stamps)]
        assert (slots[len(stamps) :] == PAD_SLOT_ID).all()
        assert (written >= block_size).all(), "a computed token has no slot, or one in the null block"
        view = self.arena.view(layer, "stamp")
        view[torch.from_numpy(written // block_size), torch.from_numpy(written % block_size), 0] = torch.from_numpy(
            stamps
        )

    def _write_states(self, layer: int, blocks: np.ndarray, stamps: np.ndarray) -> None:
        assert (blocks > 0).all()
        self.arena.view(layer, "stamp")[torch.from_numpy(blocks).long(), 0] = torch.from_numpy(stamps)

    def _state_blocks(self, step: TableStep, group_id: int, layer: int) -> np.ndarray:
        part = self._parts[layer]
        blocks = step.state_slots(group_id)[part].numpy()
        rows = step.geometry.rows_cpu
        assert np.array_equal(blocks, self.tables.block_table_cpu(group_id)[rows, part])
        return blocks

    def _null_block_bytes(self) -> np.ndarray:
        views = [self.arena.view(cache.layer, "stamp")[0] for group in self.plan.groups for cache in group.group.caches]
        return torch.cat([view.reshape(-1) for view in views]).numpy()

    @staticmethod
    def _stamps(requests: np.ndarray, group: int, layer: int, positions: np.ndarray) -> np.ndarray:
        columns = [requests + 1, np.full(len(requests), group + 1), np.full(len(requests), layer + 1), positions + 1]
        return np.stack(columns, axis=1).astype(np.float32)


def random_walk(world: World, num_steps: int, seed: int) -> None:
    """Take `num_steps` random actions and check after each.

    Raises: ForeignStampError, AssertionError or a library error at the first corruption.
    """
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        action = rng.choice(["admit", "grow", "grow", "grow", "preempt", "resume", "finish", "move"])
        running, preempted = world.running, sorted(world.preempted)
        if action == "admit":
            world.admit()
        elif action == "grow" and running:
            chosen = [request for request in running if rng.random() < 0.8]
            world.grow(chosen, rng.integers(1, MAX_GROWTH + 1, len(chosen)).tolist())
        elif action == "resume" and preempted:
            world.resume(int(rng.choice(preempted)), int(rng.integers(1, MAX_GROWTH + 1)))
        elif action == "finish" and world.rows and rng.random() < 0.5:
            world.finish(int(rng.choice(list(world.rows))))
        elif action == "preempt" and running and rng.random() < 0.5:
            world.preempt(int(rng.choice(running)))
        elif action == "move" and world.rows:
            world.move(int(rng.choice(list(world.rows))))
        world.check()
