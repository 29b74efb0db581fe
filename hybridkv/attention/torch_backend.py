"""Attention over the cache in plain torch, for a CPU or any GPU.

Pages are gathered block by block, then attended with `scaled_dot_product_attention` (or spelled out where a softcap or
sinks ask for it). Rows that decode one token are batched, in buckets of similar length so that padding stays below
half; rows that prefill are taken one by one. Query heads of one KV head are laid out as further query rows, so keys
are never repeated.

A gathered block may hold bytes that no query of its tile sees: the tail of the last block, which this sequence never
wrote, and the tokens of the first one that left the window. They are zeroed in the copy, in K and in V, because a NaN
times a zero weight is still NaN.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.arena import KVLayout
from hybridkv.attention.base import GroupBatch, LayerParams
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.kv_write import write_kv_torch


@dataclass(frozen=True)
class _Tile:
    """Rows attended in one call.

    Shapes (N rows of Q queries, L gathered positions each):
        tokens     [N*Q] int64, or the slice of flat tokens
        block_ids  [N*L/block_size] int64
        unseen     [n] int64 into the N*L gathered positions, those that no query of the row sees
        visible    [N, 1, Q, L] bool
    """

    num_rows: int
    tokens: torch.Tensor | slice
    block_ids: torch.Tensor
    unseen: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True)
class PreparedTiles:
    """A group's tiles for one step."""

    batch: GroupBatch
    tiles: tuple[_Tile, ...]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        params: LayerParams,
    ) -> torch.Tensor:
        """Write, gather, attend; shapes as in `PreparedAttention.attend`."""
        if key is not None and value is not None:
            write_kv_torch(key, value, *caches, self.batch.slot_mapping)
        out = query.new_empty(*query.shape[:2], caches[1].shape[-1])
        out[self.batch.geometry.num_tokens :] = 0
        for tile in self.tiles:
            keys = _gather(caches[0], tile, query.dtype)
            values = _gather(caches[1], tile, query.dtype)
            out[tile.tokens] = _attend_tile(query[tile.tokens], keys, values, tile, params)
        return out


class TorchBackend:
    """Gather and attend in torch; see the module's docstring."""

    kv_layout: KVLayout = "NHD"

    def prepare(self, batch: GroupBatch) -> PreparedTiles:
        """Find the blocks, the mask and the unseen positions of every tile."""
        geometry = batch.geometry
        starts = geometry.query_start_loc_cpu[: geometry.num_reqs].astype(np.int64)
        query_lens = np.diff(geometry.query_start_loc_cpu[: geometry.num_reqs + 1])
        tiles = []
        decodes = np.flatnonzero(query_lens == 1)
        if decodes.size:
            last = geometry.seq_lens_cpu[decodes].astype(np.int64) - 1
            length = last - batch.first_visible(last) + 1
            # Rows whose lengths have the same number of bits share a bucket.
            buckets = np.frexp(length.astype(np.float64))[1]
            for bucket in np.unique(buckets):
                rows = decodes[buckets == bucket]
                tiles.append(_make_tile(batch, rows, torch.from_numpy(starts[rows]).to(geometry.positions.device), 1))
        for row in np.flatnonzero(query_lens > 1):
            tokens = slice(int(starts[row]), int(starts[row] + query_lens[row]))
            tiles.append(_make_tile(batch, np.array([row]), tokens, int(query_lens[row])))
        return PreparedTiles(batch, tuple(tiles))


def _make_tile(batch: GroupBatch, rows: NDArray[np.int64], tokens: torch.Tensor | slice, num_queries: int) -> _Tile:
    geometry, size = batch.geometry, batch.block_size
    device = geometry.positions.device
    end = geometry.seq_lens_cpu[rows].astype(np.int64)  # [N]
    positions = end[:, None] - num_queries + np.arange(num_queries)  # [N, Q]
    first_visible = batch.first_visible(positions)
    first_ordinal = first_visible[:, 0] // size
    num_blocks = -(-end // size) - first_ordinal
    ordinals = first_ordinal[:, None] + np.arange(num_blocks.max())  # [N, L / block_size]
    table_rows = geometry.rows_cpu[rows][:, None]
    width = batch.block_table_cpu.shape[1]
    block_ids = np.where(
        ordinals * size < end[:, None], batch.block_table_cpu[table_rows, ordinals % width], NULL_BLOCK_ID
    )
    key_positions = (ordinals[:, :, None] * size + np.arange(size)).reshape(len(rows), 1, -1)  # [N, 1, L]
    visible = (key_positions >= first_visible[:, :, None]) & (key_positions <= positions[:, :, None])  # [N, Q, L]
    seen = (key_positions[:, 0] >= first_visible[:, :1]) & (key_positions[:, 0] < end[:, None])  # [N, L]
    return _Tile(
        num_rows=len(rows),
        tokens=tokens,
        block_ids=torch.from_numpy(block_ids.reshape(-1).astype(np.int64)).to(device),
        unseen=torch.from_numpy(np.flatnonzero(~seen)).to(device),
        visible=torch.from_numpy(visible[:, None]).to(device),
    )


def _gather(cache: torch.Tensor, tile: _Tile, dtype: torch.dtype) -> torch.Tensor:
    """Return `[N, num_kv_heads, L, dim]` from a NHD cache, unseen positions zeroed."""
    pages = cache.index_select(0, tile.block_ids)  # [N * L / block_size, block_size, num_kv_heads, dim]
    flat = pages.view(-1, *pages.shape[2:])  # [N * L, num_kv_heads, dim]
    flat.index_fill_(0, tile.unseen, 0)
    return flat.view(tile.num_rows, -1, *flat.shape[1:]).transpose(1, 2).to(dtype)


def _attend_tile(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: _Tile, params: LayerParams
) -> torch.Tensor:
    """Attend N rows of Q queries; query `[N*Q, num_heads, dim]`, returns the same with the values' dim."""
    num_rows, num_kv_heads = keys.shape[0], keys.shape[1]
    num_queries, num_heads = query.shape[0] // num_rows, query.shape[1]
    group = num_heads // num_kv_heads
    # Heads that share keys become rows of one attention: [N, num_kv_heads, group * Q, dim], group-major.
    packed = query.view(num_rows, num_queries, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(num_rows, num_kv_heads, group * num_queries, -1)
    visible = tile.visible if num_queries == 1 else tile.visible.repeat(1, 1, group, 1)  # [N, 1, group * Q or 1, L]
    if params.softcap is None and params.sinks is None:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            packed, keys, values, attn_mask=visible, scale=params.scale
        )
    else:
        mixed = _spelled_out(packed, keys, values, visible, params)
    mixed = mixed.view(num_rows, num_kv_heads, group, num_queries, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(num_rows * num_queries, num_heads, -1)


def _spelled_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, params: LayerParams
) -> torch.Tensor:
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * params.scale  # [N, num_kv_heads, group * Q, L]
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is not None:
        num_kv_heads, num_rows = scores.shape[1], scores.shape[2]
        group = params.sinks.numel() // num_kv_heads
        sinks = params.sinks.float().view(1, num_kv_heads, group, 1, 1)
        sinks = sinks.expand(scores.shape[0], -1, -1, num_rows // group, 1).reshape(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
