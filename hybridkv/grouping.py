"""Layers to KV cache groups: one group per lifecycle."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hybridkv.errors import SpecError
from hybridkv.specs import DTYPE_BYTES, CacheTensor, Dtype, LayerCache, Lifecycle, ModelSpec
from hybridkv.units import round_up


@dataclass(frozen=True)
class GroupedCache:
    """One layer's cache inside a group: which layer, which of its caches, and the cache."""

    layer: int
    cache_idx: int
    cache: LayerCache


@dataclass(frozen=True)
class TensorPlacement:
    """Where one tensor of one layer lies inside a block.

    Shapes:
        shape  what one entry stores, `[heads, dim]` for keys
    Units: `offset_bytes` from the first byte of the block; `num_entries` entries follow each other. `part` says which
    of a sequence's blocks it is where a state is split over its layers, 0 otherwise.
    """

    layer: int
    cache_idx: int
    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    offset_bytes: int
    num_entries: int
    part: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes this tensor takes in one block."""
        return self.num_entries * prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVCacheGroup:
    """All layer caches of one lifecycle, which share one block table."""

    group_id: int
    lifecycle: Lifecycle
    caches: tuple[GroupedCache, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers with a cache in this group."""
        return len({cache.layer for cache in self.caches})

    @property
    def is_state(self) -> bool:
        """Whether a block is a state set instead of a run of tokens."""
        return self.lifecycle.kind == "state"

    def place_tensors(self, block_size: int, num_parts: int = 1) -> tuple[TensorPlacement, ...]:
        """Lay the group's tensors one after another inside a block of `block_size` tokens.

        A state split into `num_parts` parts has as many blocks a sequence: part p holds the p-th run of its layers.
        Each tensor starts at a multiple of its element size.

        Raises: SpecError if a compressed tensor's entries do not fill whole blocks.
        """
        placements: list[TensorPlacement] = []
        offset_bytes, part = 0, 0
        for cache_position, cache in enumerate(self.caches):
            own_part = cache_position * num_parts // len(self.caches)
            if own_part != part:
                offset_bytes, part = 0, own_part
            for tensor in cache.cache.tensors:
                offset_bytes = round_up(offset_bytes, DTYPE_BYTES[tensor.dtype])
                placement = TensorPlacement(
                    cache.layer,
                    cache.cache_idx,
                    tensor.name,
                    tensor.shape,
                    tensor.dtype,
                    offset_bytes,
                    _num_entries(cache, tensor, block_size),
                    part,
                )
                placements.append(placement)
                offset_bytes += placement.num_bytes
        return tuple(placements)


def group_layers(spec: ModelSpec, lifecycles: Sequence[Lifecycle] = ()) -> tuple[KVCacheGroup, ...]:
    """Group a model's layer caches by lifecycle, in the order in which the lifecycles first appear.

    `lifecycles` come first if given, with an empty group for one that no layer has.
    """
    by_lifecycle: dict[Lifecycle, list[GroupedCache]] = {lifecycle: [] for lifecycle in lifecycles}
    for layer, cache_idx, cache in spec.owned_caches():
        by_lifecycle.setdefault(cache.lifecycle, []).append(GroupedCache(layer, cache_idx, cache))
    return tuple(
        KVCacheGroup(group_id, lifecycle, tuple(caches))
        for group_id, (lifecycle, caches) in enumerate(by_lifecycle.items())
    )


def _num_entries(cache: GroupedCache, tensor: CacheTensor, block_size: int) -> int:
    if tensor.kind == "per_sequence":
        return 1
    if block_size % tensor.tokens_per_entry:
        raise SpecError(
            f"block_size: got {block_size}, layer {cache.layer}'s {tensor.name!r} keeps an entry per "
            f"{tensor.tokens_per_entry} tokens; use a multiple of it"
        )
    return block_size // tensor.tokens_per_entry
