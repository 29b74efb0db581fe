"""Real cache memory, on the device and on the host, in which every token and state carries a stamp of its content.

A stamp is (hash of the tokens so far, group, layer, position), each plus one: whoever shares a prefix finds its own.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv import (
    BatchLimits,
    CacheTensor,
    ChunkedAttention,
    FullAttention,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    State,
    plan_cache,
)
from hybridkv.arena import Arena, ArenaLayout
from hybridkv.copy_list import BlockCopies
from hybridkv.multi_group import TableStep
from hybridkv.plan import CachePlan
from hybridkv.retention import first_needed_token
from hybridkv.swapping import host_plan
from hybridkv_kernels.block_copy import check_copy_blocks, copy_blocks_of_views, copy_blocks_torch
from hybridkv_kernels.constants import PAD_SLOT_ID

Int = NDArray[np.int64]
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
LIFECYCLES = (FullAttention(), SlidingWindow(window=7), ChunkedAttention(chunk=12), State(family="mamba2"))
MIXED_SIZES, EQUAL_SIZES = (4, 3, 8, 1), (4, 4, 4, 1)
LAYERS_PER_GROUP = 2


class ForeignStampError(AssertionError):
    """A request found a stamp that is not its own."""


def world_spec(lifecycles: tuple[int, ...]) -> ModelSpec:
    """Two layers for each of some `LIFECYCLES`; every token or state stores a four-number stamp."""
    layers = []
    for lifecycle in (LIFECYCLES[number] for number in lifecycles):
        kind = "per_sequence" if lifecycle.kind == "state" else "per_token"
        # A state as large as a block of tokens, so that the planner splits the two states over their layers.
        shape = (16, 4) if kind == "per_sequence" else (1, 4)
        tensor = CacheTensor(name="stamp", kind=kind, shape=shape, dtype="float32")
        cache = LayerCache(lifecycle=lifecycle, tensors=(tensor,))
        layers += [LayerSpec(layer=len(layers) + i, caches=(cache,)) for i in range(LAYERS_PER_GROUP)]
    return ModelSpec(name="world", model_type="world", layers=tuple(layers))


def world_plan(
    lifecycles: tuple[int, ...], block_sizes: tuple[int, ...], num_slabs: int, limits: BatchLimits
) -> CachePlan:
    """Plan groups of some `LIFECYCLES`, with the block sizes of that many, in `num_slabs` slabs."""
    spec = world_spec(lifecycles)
    sizes = {group: block_sizes[number] for group, number in enumerate(lifecycles)}
    slab_bytes = plan_cache(spec, 2**24, limits, block_size=sizes).slab_bytes
    return plan_cache(spec, num_slabs * slab_bytes, limits, block_size=sizes)


class Written:
    """What one step writes: kept, so that it can be written once more when the step ends.

    Shapes: owners [num_tokens], requests by token; by group slots [num_tokens] or state blocks [num_layers, num_rows]
    """

    def __init__(self, step: TableStep, owners: Int, hashes: NDArray[np.int32]) -> None:
        geometry = step.geometry
        self.owners, self.hashes = owners, hashes
        self.positions = geometry.positions_cpu[: geometry.num_tokens].copy()
        self.slots = step.slot_mapping.numpy()[:, : geometry.num_tokens].copy()
        self.last = np.flatnonzero(np.append(np.diff(owners) != 0, True)) if len(owners) else owners
        self.states: dict[int, Int] = {}


class StampedMemory:
    """Cache memory of a plan, and the host's for swapped requests."""

    def __init__(self, plan: CachePlan, layout: ArenaLayout, host_bytes: int, copy: CopyBlocks | None = None) -> None:
        self.plan, self._copy = plan, copy or copy_blocks_torch
        self._arena = Arena(plan, layout=layout)
        self._host = Arena(host_plan(plan, host_bytes), layout=layout) if host_bytes else None
        self._parts = {tensor.layer: tensor.part for group in plan.groups for tensor in group.tensors}
        self._layers = [[cache.layer for cache in group.group.caches] for group in plan.groups]
        # Stamps are integers in the memory of floats, which nobody computes with.
        self._stamps = {layer: self._arena.view(layer, "stamp").numpy().view(np.int32) for layer in self._parts}
        first = self._arena.view(0, "stamp")
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()) if layout == "slab" else None
        sizes = [[group.block_stride_bytes, group.payload_bytes_per_block] for group in plan.groups]
        self._group_bytes = torch.tensor(sizes, dtype=torch.int64)

    # Forward passes

    def written_by(
        self, step: TableStep, owners: Int, hashes: NDArray[np.int32], *, from_elsewhere: bool = False
    ) -> Written:
        """Note where a step writes; each token has a slot, but for what comes from elsewhere and is out of a window."""
        written = Written(step, owners, hashes)
        assert (step.slot_mapping.numpy()[:, len(owners) :] == PAD_SLOT_ID).all()
        for group_id, group in enumerate(self.plan.groups):
            if group.group.is_state:
                written.states[group_id] = self.state_blocks(step, group_id)
                assert (written.states[group_id] >= group.blocks_per_slab).all(), "a state has no block"
            else:
                slots = written.slots[group_id]
                blocks = slots[slots != PAD_SLOT_ID] // group.block_size
                assert from_elsewhere or len(blocks) == len(slots), "a computed token has no slot"
                assert (blocks >= group.blocks_per_slab).all(), "a token is written to the null block"
        return written

    def write(self, written: Written, mask: NDArray[np.bool_] | None = None) -> None:
        """Write a step's stamps, those of the tokens in `mask` [num_tokens] alone if it is given."""
        which = np.arange(len(written.owners)) if mask is None else np.flatnonzero(mask)
        rows = np.flatnonzero(np.isin(written.last, which))
        for group_id, group in enumerate(self.plan.groups):
            tokens = written.last[rows] if group.group.is_state else which
            for i, layer in enumerate(self._layers[group_id]):
                stamps = stamps_of(written.hashes[tokens], group_id, layer, written.positions[tokens])
                if group.group.is_state:
                    self._stamps[layer][written.states[group_id][i, rows]] = stamps[:, None]
                else:
                    slots = written.slots[group_id, tokens]
                    has_slot = slots != PAD_SLOT_ID
                    slots = slots[has_slot]
                    self._stamps[layer][slots // group.block_size, slots % group.block_size, 0] = stamps[has_slot]

    # Reading back

    def check_tokens(self, step: TableStep, hashes: NDArray[np.int32], num_settled: Int) -> None:
        """Check the stamps of a batch's tokens that queries after `num_settled` [num_tokens] tokens see."""
        positions = step.geometry.positions_cpu[: len(hashes)]
        for group_id, group in enumerate(self.plan.groups):
            if group.group.is_state:
                continue
            live = positions >= first_needed_token(group.group.lifecycle, num_settled)
            slots = step.slot_mapping.numpy()[group_id, : len(hashes)][live]
            if (slots < group.block_size * group.blocks_per_slab).any():
                raise ForeignStampError(f"a live token has no slot in group {group_id}")
            for layer in self._layers[group_id]:
                found = self._stamps[layer][slots // group.block_size, slots % group.block_size, 0]
                self._compare(found, stamps_of(hashes[live], group_id, layer, positions[live]))

    def check_states(self, step: TableStep, hashes: NDArray[np.int32], positions: Int) -> None:
        """Check the states of a batch's rows, which have seen the token at `positions` [num_rows] last."""
        for group_id, group in enumerate(self.plan.groups):
            if group.group.is_state:
                blocks = self.state_blocks(step, group_id)
                for i, layer in enumerate(self._layers[group_id]):
                    found = self._stamps[layer][blocks[i]]
                    expected = stamps_of(hashes, group_id, layer, positions)
                    self._compare(found.reshape(-1, 4), expected.repeat(found.shape[1], axis=0))

    def state_blocks(self, step: TableStep, group_id: int) -> Int:
        """Return `[num_layers, num_rows]`: the state block of each layer."""
        parts = step.state_slots(group_id)
        blocks = [parts[self._parts[layer]].numpy()[: step.geometry.num_reqs] for layer in self._layers[group_id]]
        return np.stack(blocks)

    def check_null(self) -> None:
        """Check that nobody wrote the null blocks."""
        for group_id, group in enumerate(self.plan.groups):
            for layer in self._layers[group_id]:
                assert not self._stamps[layer][: group.blocks_per_slab].any(), "a null block was written"

    @staticmethod
    def _compare(found: NDArray[np.int32], expected: NDArray[np.int32]) -> None:
        if not np.array_equal(found, expected):
            wrong = int((found != expected).any(axis=1).argmax())
            raise ForeignStampError(
                f"found {found[wrong]}, not {expected[wrong]} (content, group, layer, position), and "
                f"{(found != expected).any(axis=1).sum()} of {len(found)} in all"
            )

    # Copies

    def run(self, copies: BlockCopies) -> None:
        """Run a manager's copies in the documented order; each list reads all before it writes."""
        self._within_device(copies.moves)
        self._to_or_from_host(copies.from_host, to_host=False)
        self._within_device(copies.within)
        self._to_or_from_host(copies.to_host, to_host=True)

    def _within_device(self, copies: Int) -> None:
        if not len(copies):
            return
        for group, per_slab in enumerate(group.blocks_per_slab for group in self.plan.groups):
            assert (copies[copies[:, 0] == group, 1:] >= per_slab).all(), "a copy reads or writes a null block"
        self._check_list(copies)
        if self._bytes is not None:
            entries, count = torch.from_numpy(copies), torch.tensor([len(copies)], dtype=torch.int32)
            check_copy_blocks(self._bytes, entries, count, self._group_bytes)
            self._copy(self._bytes, entries, count, self._group_bytes)
            return
        for group, layers in enumerate(self._layers):
            sources, targets = torch.from_numpy(copies[copies[:, 0] == group, 1:].T.copy())
            copy_blocks_of_views([self._arena.view(layer, "stamp") for layer in layers], sources, targets)

    def _to_or_from_host(self, copies: Int, *, to_host: bool) -> None:
        if not len(copies):
            return
        assert self._host is not None
        self._check_list(copies, num_memories=2)
        for group, layers in enumerate(self._layers):
            sources, targets = torch.from_numpy(copies[copies[:, 0] == group, 1:].T.copy())
            for layer in layers:
                device, host = self._arena.view(layer, "stamp"), self._host.view(layer, "stamp")
                (host if to_host else device)[targets] = (device if to_host else host)[sources]

    @staticmethod
    def _check_list(copies: Int, num_memories: int = 1) -> None:
        targets = {(group, target) for group, _, target in copies.tolist()}
        assert len(targets) == len(copies), "a block is written twice in one list of copies"
        if num_memories == 1:
            assert targets.isdisjoint((group, source) for group, source, _ in copies.tolist()), "copies form a chain"


def stamps_of(hashes: NDArray[np.int32], group: int, layer: int, positions: Int) -> NDArray[np.int32]:
    """Return `[n, 4]` stamps of positions."""
    stamps = np.empty((len(hashes), 4), dtype=np.int32)
    stamps[:, 0], stamps[:, 1], stamps[:, 2], stamps[:, 3] = hashes, group + 1, layer + 1, positions + 1
    return stamps
