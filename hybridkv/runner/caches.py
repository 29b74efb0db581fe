"""Each layer's caches as tensors, and what all layers of one forward pass share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hybridkv._torch import torch
from hybridkv.arena import Arena
from hybridkv.attention import AttentionBackend, GroupBatch, LayerParams, PreparedAttention
from hybridkv.errors import UnsupportedModel
from hybridkv.plan import CachePlan
from hybridkv.runner.latents import LatentBatch
from hybridkv.specs import State, StateFamily
from hybridkv_kernels.state_batch import StateBatch

_LATENT = "latent"
_Cache = TypeVar("_Cache")


@dataclass(frozen=True)
class AttentionCache:
    """One layer's keys and values; a layer that shares another's does not write."""

    group_id: int
    views: tuple[torch.Tensor, torch.Tensor]
    owns: bool = True


@dataclass(frozen=True)
class LatentCache:
    """One layer's latents `[num_blocks, block_size, 1, dim]`, the rotary elements last."""

    group_id: int
    view: torch.Tensor
    num_rotary: int


@dataclass(frozen=True)
class StateCache:
    """One layer's recurrent states by name, `[num_blocks, ...]`; a row's block is in column `part` of its table."""

    family: StateFamily
    group_id: int
    part: int
    views: Mapping[str, torch.Tensor]


class LayerCaches:
    """The caches of every layer, by layer.

    Raises (on construction): UnsupportedModel for a cache that this runner does not take.
    """

    def __init__(self, plan: CachePlan, arena: Arena, backend: AttentionBackend) -> None:
        self.backend = backend
        self.attention: dict[int, AttentionCache] = {}
        self.latents: dict[int, LatentCache] = {}
        self.states: dict[int, StateCache] = {}
        for group in plan.groups:
            parts = {(tensor.layer, tensor.cache_idx): tensor.part for tensor in group.tensors}
            for cache in group.group.caches:
                where = cache.layer, cache.cache_idx
                views = {t.name: arena.view(cache.layer, t.name, cache.cache_idx) for t in cache.cache.tensors}
                lifecycle = cache.cache.lifecycle
                if isinstance(lifecycle, State):
                    state = StateCache(lifecycle.family, group.group.group_id, parts[where], views)
                    _put(self.states, cache.layer, state)
                elif list(views) == ["k", "v"] and lifecycle.kind != "cross_attention":
                    _put(self.attention, cache.layer, AttentionCache(group.group.group_id, (views["k"], views["v"])))
                elif list(views) == [_LATENT]:
                    num_rotary = cache.cache.tensors[0].rotary_elements or 0
                    _put(self.latents, cache.layer, LatentCache(group.group.group_id, views[_LATENT], num_rotary))
                else:
                    raise UnsupportedModel(
                        f"layer {cache.layer}: keeps {list(views)} with lifecycle {lifecycle.kind}; this "
                        "runner takes keys and values of self-attention, latents, and recurrent states"
                    )
        self._add_shared(plan)

    def begin(self, batches: Sequence[GroupBatch], num_prompt_tokens: Sequence[int]) -> "ForwardStep":
        """Prepare every group for one forward pass.

        Args:
            num_prompt_tokens: of each batch position; tokens behind them were generated.
        """
        with_latents = {cache.group_id for cache in self.latents.values()}
        attends = {cache.group_id for cache in self.attention.values()}
        return ForwardStep(
            caches=self,
            prepared={g: self.backend.prepare(batches[g]) for g in attends},
            latents={g: LatentBatch(batches[g]) for g in with_latents},
            states={
                (cache.group_id, cache.part): _state_batch(batches[cache.group_id], cache.part)
                for cache in self.states.values()
            },
            generated=_generated_tokens(batches[0], num_prompt_tokens) if self.states else None,
        )

    def _add_shared(self, plan: CachePlan) -> None:
        for layer in plan.spec.layers:
            for cache in layer.caches:
                if cache.shares_kv_with is None:
                    continue
                if cache.shares_kv_with not in self.attention:
                    raise UnsupportedModel(f"layer {layer.layer}: shares a cache that is not one of keys and values")
                owner = self.attention[cache.shares_kv_with]
                self.attention[layer.layer] = AttentionCache(owner.group_id, owner.views, owns=False)


@dataclass
class ForwardStep:
    """What the layers of one forward pass share; one object serves one pass.

    `attended` are the layers that attended, `advanced` the states that were used, by layer and name; `updated_layer` is
    the layer that last called the cache.

    Shapes: `generated` [T] bool, whether a token was generated, not part of the prompt; None without states
    """

    caches: LayerCaches
    prepared: Mapping[int, PreparedAttention]
    latents: Mapping[int, LatentBatch]
    states: Mapping[tuple[int, int], StateBatch]
    generated: torch.Tensor | None
    attended: set[int] = field(default_factory=set)
    advanced: set[tuple[int, str]] = field(default_factory=set)
    updated_layer: int | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: LayerParams
    ) -> torch.Tensor:
        """Write and attend one layer.

        Shapes: query [1, heads, T, dim], key and value [1, kv_heads, T, dim], those of a layer with latents expanded
            from all tokens that `update_latents` gave; returns [1, T, heads, v_dim]
        """
        self.attended.add(layer)
        if layer in self.caches.latents:
            latents = self.latents[self.caches.latents[layer].group_id]
            return latents.attend(query[0], key[0], value[0], params)[None]
        if layer not in self.caches.attention:
            raise UnsupportedModel(f"layer {layer}: attends, but its spec has no attention cache")
        cache = self.caches.attention[layer]
        new_query, new_key, new_value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if cache.owns:
            self._check_entry(layer, cache, new_key, new_value)
        prepared = self.prepared[cache.group_id]
        if not cache.owns:
            return prepared.attend(new_query, None, None, cache.views, params)[None]
        return prepared.attend(new_query, new_key, new_value, cache.views, params)[None]

    def update_latents(
        self, layer: int, compressed: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new latents; return those of all tokens of all rows, row after row.

        Shapes: compressed [1, 1, T, rank], rotary [1, 1, T, rotary_dim]; returns the same with all tokens for T
        """
        cache = self.caches.latents[layer]
        return self.latents[cache.group_id].update(cache.view, cache.num_rotary, compressed, rotary)

    def state(self, layer: int, name: str) -> tuple[torch.Tensor, StateBatch]:
        """Return one of a layer's states `[num_blocks, ...]` and the rows that advance it."""
        self.advanced.add((layer, name))
        cache = self.caches.states[layer]
        return cache.views[name], self.states[cache.group_id, cache.part]

    def check_complete(self) -> None:
        """Raise UnsupportedModel if a layer with a cache did not use all of it."""
        missing = sorted({*self.caches.attention, *self.caches.latents} - self.attended)
        if missing:
            raise UnsupportedModel(
                f"layers {missing}: did not attend through the cache; their attention does not use the attention "
                "interface of transformers, so they cannot be driven"
            )
        states = {(layer, name) for layer, cache in self.caches.states.items() for name in cache.views}
        idle = sorted(states - self.advanced)
        if idle:
            layers, names = (sorted(set(part)) for part in zip(*idle, strict=True))
            raise UnsupportedModel(
                f"layers {layers}: did not advance their states ({', '.join(names)}); their modules do not call the "
                "functions that use them, so they cannot be driven"
            )

    def _check_entry(self, layer: int, cache: AttentionCache, key: torch.Tensor, value: torch.Tensor) -> None:
        heads = 2 if self.caches.backend.kv_layout == "NHD" else 1
        expected = [(view.shape[heads], view.shape[3]) for view in cache.views]
        got = [tuple(key.shape[1:]), tuple(value.shape[1:])]
        if got != expected:
            raise UnsupportedModel(
                f"layer {layer}: makes keys {got[0]} and values {got[1]}, its spec says {expected[0]} and {expected[1]}"
            )


def _put(caches: dict[int, _Cache], layer: int, cache: _Cache) -> None:
    if layer in caches:
        raise UnsupportedModel(f"layer {layer}: keeps two caches of one kind; this runner takes one of each")
    caches[layer] = cache


def _state_batch(batch: GroupBatch, part: int) -> StateBatch:
    """Return the rows of a group of states: each goes on in its own block, a new sequence from zeros."""
    assert batch.state_slots is not None
    geometry, slots = batch.geometry, batch.state_slots[part]
    return StateBatch(geometry.query_start_loc, slots, slots, geometry.zero_start, geometry.max_query_len)


def _generated_tokens(batch: GroupBatch, num_prompt_tokens: Sequence[int]) -> torch.Tensor:
    geometry = batch.geometry
    prompt_ends = np.zeros(len(geometry.positions_cpu), dtype=np.int64)
    query_lens = np.diff(geometry.query_start_loc_cpu[: geometry.num_reqs + 1])
    prompt_ends[: geometry.num_tokens] = np.repeat(np.asarray(num_prompt_tokens, dtype=np.int64), query_lens)
    return torch.from_numpy(geometry.positions_cpu >= prompt_ends).to(geometry.positions.device)
