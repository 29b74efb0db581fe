"""Layers to KV cache groups: one group per lifecycle."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hybridkv.errors import SpecError
from hybridkv.specs import DTYPE_BYTES, CacheTensor, Dtype, LayerCache, Lifecycle, ModelSpec
from hybridkv.units import cdiv, round_up


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
    Units: `offset_bytes` from the block's first byte; `num_entries` entries follow each other.
    """

    layer: int
    cache_idx: int
    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    offset_bytes: int
    num_entries: int

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

    def _tensors(self) -> Iterator[tuple[GroupedCache, CacheTensor]]:
        for cache in self.caches:
            for tensor in cache.cache.tensors:
                yield cache, tensor

    def place_tensors(self, block_size: int) -> tuple[TensorPlacement, ...]:
        """Lay the group's tensors one after another inside a block of `block_size` tokens.

        Each tensor starts at a multiple of its element size.

        Raises: SpecError if a compressed tensor's entries do not fill whole blocks.
        """
        placements: list[TensorPlacement] = []
        offset_bytes = 0
        for cache, tensor in self._tensors():
            if tensor.kind == "per_token" and block_size % tensor.tokens_per_entry:
                raise SpecError(
                    f"block_size: got {block_size}, layer {cache.layer}'s {tensor.name!r} keeps an entry per "
                    f"{tensor.tokens_per_entry} tokens; use a multiple of it"
                )
            offset_bytes = round_up(offset_bytes, DTYPE_BYTES[tensor.dtype])
            num_entries = 1 if tensor.kind == "per_sequence" else cdiv(block_size, tensor.tokens_per_entry)
            placement = TensorPlacement(
                cache.layer, cache.cache_idx, tensor.name, tensor.shape, tensor.dtype, offset_bytes, num_entries
            )
            placements.append(placement)
            offset_bytes += placement.num_bytes
        return tuple(placements)


def group_layers(spec: ModelSpec) -> tuple[KVCacheGroup, ...]:
    """Group a model's layer caches by lifecycle, in the order in which the lifecycles first appear."""
    by_lifecycle: dict[Lifecycle, list[GroupedCache]] = {}
    for layer, cache_idx, cache in spec.owned_caches():
        by_lifecycle.setdefault(cache.lifecycle, []).append(GroupedCache(layer, cache_idx, cache))
    return tuple(
        KVCacheGroup(group_id, lifecycle, tuple(caches))
        for group_id, (lifecycle, caches) in enumerate(by_lifecycle.items())
    )
