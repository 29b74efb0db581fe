"""The memory behind a plan: one byte buffer seen as one tensor per layer.

Two layouts serve the same block ids and slots:

* `"slab"`: blocks of all layers of a group lie together, `block_stride_bytes` apart, and every slab can serve any
  group. This is what the plan's bytes are counted for.
* `"contiguous"`: each layer's tensor is one dense allocation of `num_blocks` blocks. Every group then needs room for
  all its block ids, so it takes up to `num_groups` times the memory; it exists for kernels that want dense tensors
  and as the yardstick of the slab layout.
"""

from math import prod
from typing import Literal

from hybridkv._torch import allocate_zeros, torch
from hybridkv.grouping import TensorPlacement
from hybridkv.plan import CachePlan, GroupPlan
from hybridkv.specs import DTYPE_BYTES

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
            self._bytes = allocate_zeros("arena", (plan.arena_bytes,), torch.uint8, self.device)
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
