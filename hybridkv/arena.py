"""The memory behind a plan: one byte buffer seen as one tensor per layer.

Two layouts serve the same block ids and slots:

* `"slab"`: blocks of all layers of a group lie together, `block_stride_bytes` apart, and every slab can serve any
  group. This is what the plan's bytes are counted for.
* `"contiguous"`: each layer's tensor is one dense allocation of `num_blocks` blocks. Every group then needs room for
  all its block ids, so it takes up to `num_groups` times the memory; it exists for kernels that want dense tensors
  and as the yardstick of the slab layout.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import allocate_zeros, torch
from hybridkv.copy_list import BlockCopies
from hybridkv.grouping import TensorPlacement
from hybridkv.plan import CachePlan, GroupPlan
from hybridkv.specs import DTYPE_BYTES
from hybridkv.swapping import host_plan
from hybridkv_kernels.block_copy import copy_blocks, copy_blocks_of_views, copy_blocks_torch

ArenaLayout = Literal["slab", "contiguous"]
KVLayout = Literal["NHD", "HND"]


class Arena:
    """Zeroed memory of a plan and the views that kernels use.

    Per-token tensors are `[num_blocks, block_size, *shape]` (NHD), or `[num_blocks, heads, block_size, dim]` (HND, for
    tensors of two dimensions), with one entry for every `tokens_per_entry` tokens of a compressed tensor; per-sequence
    tensors are `[num_blocks, *shape]`. Block 0 is the null block: it is zero
    and must stay so.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        device: str | torch.device = "cpu",
        layout: ArenaLayout = "slab",
        kv_layout: KVLayout = "NHD",
    ) -> None:
        if layout not in ("slab", "contiguous") or kv_layout not in ("NHD", "HND"):
            raise ValueError(f"layout: got {layout!r} and {kv_layout!r}, expected slab or contiguous and NHD or HND")
        self.plan, self.layout, self.kv_layout = plan, layout, kv_layout
        self.device = torch.device(device)
        self._views: dict[tuple[int, int, str], torch.Tensor] = {}
        if layout == "slab":
            self._bytes = self._allocate_bytes()
        for group in plan.groups:
            for placement in group.tensors:
                key = (placement.layer, placement.cache_idx, placement.name)
                self._views[key] = self._make_view(group, placement)

    def view(self, layer: int, name: str, cache_idx: int = 0) -> torch.Tensor:
        """Return the tensor `name` of one layer's cache, as laid out in the class docstring.

        Raises: ValueError for a layer or name that owns no bytes.
        """
        try:
            return self._views[layer, cache_idx, name]
        except KeyError:
            names = sorted({key[2] for key in self._views if key[0] == layer})
            raise ValueError(f"layer {layer}, cache {cache_idx}: got tensor {name!r}, the layer owns {names}") from None

    def run_copies(self, copies: BlockCopies, host: "HostArena | None" = None) -> None:
        """Copy whole blocks in the order that `BlockCopies` asks for, on the current stream of a GPU.

        On a GPU each list within the device is one launch, and blocks on their way from or to pinned memory are not
        waited for. A CPU copies block by block.

        Args:
            host: where blocks of preempted rows wait.

        Raises: ValueError if blocks are to come from a host or go there and none is given.
        """
        if host is None and (len(copies.to_host) or len(copies.from_host)):
            raise ValueError(
                f"host: got none, {len(copies.to_host)} blocks are to go there and {len(copies.from_host)} to come back"
            )
        self._copy_within(copies.moves)
        if host is not None:
            _copy_between(host, self, copies.from_host)
        self._copy_within(copies.within)
        if host is not None:
            _copy_between(self, host, copies.to_host)

    def _copy_within(self, copies: NDArray[np.int64]) -> None:
        """Copy blocks `[n, 3]` (group, source, destination)."""
        if not len(copies):
            return
        if self.layout == "contiguous":
            for group, sources, targets in _by_group(copies):
                on_device = [torch.from_numpy(blocks).to(self.device) for blocks in (sources, targets)]
                copy_blocks_of_views(self._views_of(group), *on_device)
            return
        sizes = [[group.block_stride_bytes, group.payload_bytes_per_block] for group in self.plan.groups]
        run = copy_blocks_torch if self.device.type == "cpu" else copy_blocks
        run(
            self._bytes,
            torch.from_numpy(np.ascontiguousarray(copies)).to(self.device),
            torch.tensor([len(copies)], dtype=torch.int32, device=self.device),
            torch.tensor(sizes, dtype=torch.int64, device=self.device),
        )

    def _views_of(self, group: int) -> list[torch.Tensor]:
        """Return the tensors of a group, `[num_blocks, ...]` each."""
        tensors = self.plan.groups[group].tensors
        return [self._views[tensor.layer, tensor.cache_idx, tensor.name] for tensor in tensors]

    def _payloads_of(self, group: int) -> torch.Tensor:
        """Return the bytes `[num_blocks, payload_bytes_per_block]` of a group in the slab layout."""
        plan = self.plan.groups[group]
        shape = plan.num_blocks, plan.payload_bytes_per_block
        return self._bytes.as_strided(shape, (plan.block_stride_bytes, 1))

    def _allocate_bytes(self) -> torch.Tensor:
        return allocate_zeros("arena", (self.plan.arena_bytes,), torch.uint8, self.device)

    def _make_view(self, group: GroupPlan, placement: TensorPlacement) -> torch.Tensor:
        entry = placement.shape
        per_sequence = group.group.is_state
        if per_sequence:
            inner: tuple[int, ...] = entry
        elif self.kv_layout == "HND" and len(entry) == 2:
            inner = (entry[0], placement.num_entries, entry[1])
        else:
            inner = (placement.num_entries, *entry)
        dtype = getattr(torch, placement.dtype)
        if self.layout == "contiguous":
            return allocate_zeros("arena", (group.num_blocks, *inner), dtype, self.device)
        element_bytes = DTYPE_BYTES[placement.dtype]
        inner_strides = tuple(prod(inner[i + 1 :]) for i in range(len(inner)))
        return self._bytes.view(dtype).as_strided(
            (group.num_blocks, *inner),
            (group.block_stride_bytes // element_bytes, *inner_strides),
            placement.offset_bytes // element_bytes,
        )


class HostArena(Arena):
    """Memory on the host for the blocks of preempted rows, laid out in slabs; pinned beside a GPU.

    Args:
        arena: the arena on the device that blocks come from.
        num_bytes: the manager's `ManagerOptions.host_bytes`.
    """

    def __init__(self, arena: Arena, num_bytes: int) -> None:
        self._pinned = arena.device.type == "cuda"
        super().__init__(host_plan(arena.plan, num_bytes), kv_layout=arena.kv_layout)

    def _allocate_bytes(self) -> torch.Tensor:
        memory = super()._allocate_bytes()
        return memory.pin_memory() if self._pinned else memory


def _copy_between(source: Arena, target: Arena, copies: NDArray[np.int64]) -> None:
    """Copy blocks `[n, 3]` (group, source, destination) from one arena to another."""
    for group, sources, targets in _by_group(copies):
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
        if source.layout == target.layout == "slab":
            pairs = [(source._payloads_of(group), target._payloads_of(group))]
        else:
            pairs = list(zip(source._views_of(group), target._views_of(group), strict=True))
        for block, to in zip(sources.tolist(), targets.tolist(), strict=True):
            for read, written in pairs:
                written[to].copy_(read[block], non_blocking=True)


def _by_group(copies: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Return each group with its source and destination blocks."""
    groups = np.unique(copies[:, 0]).tolist()
    parts = [(group, copies[copies[:, 0] == group]) for group in groups]
    return [(group, part[:, 1].copy(), part[:, 2].copy()) for group, part in parts]
