"""Attention over latents: the model expands them, so each step hands it those of all tokens."""

import numpy as np

from hybridkv._torch import torch
from hybridkv.attention import GroupBatch, LayerParams
from hybridkv.errors import UnsupportedModel
from hybridkv_kernels.kv_write import write_kv_torch


class LatentBatch:
    """One group of latents in one step.

        gathered latents | row 0: 0 .. seq_len-1 | row 1: 0 .. seq_len-1 | ...

    Only a row's own tokens are gathered, so bytes beyond them never reach the model.
    """

    def __init__(self, batch: GroupBatch) -> None:
        geometry, size = batch.geometry, batch.block_size
        self._batch = batch
        lengths = geometry.seq_lens_cpu[: geometry.num_reqs].astype(np.int64)
        positions = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        rows = np.repeat(geometry.rows_cpu[: geometry.num_reqs], lengths)
        width = batch.block_table_cpu.shape[1]
        blocks = batch.block_table_cpu[rows, positions // size % width].astype(np.int64)
        device = geometry.positions.device
        self._slots = torch.from_numpy(blocks * size + positions % size).to(device)
        self._starts = np.concatenate([[0], lengths.cumsum()]).tolist()
        self._query_starts = geometry.query_start_loc_cpu[: geometry.num_reqs + 1].tolist()

    def update(
        self, view: torch.Tensor, num_rotary: int, compressed: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new latents and return all of them; shapes as in `ForwardStep.update_latents`."""
        rank = view.shape[3] - num_rotary
        if compressed.shape[-1] != rank or rotary.shape[-1] != num_rotary:
            raise UnsupportedModel(
                f"latents: got {compressed.shape[-1]} and {rotary.shape[-1]} elements, the spec says {rank} and "
                f"{num_rotary}"
            )
        new, new_rotary = (tensor[0].transpose(0, 1) for tensor in (compressed, rotary))  # [T, 1, dim]
        write_kv_torch(new, new_rotary, view[..., :rank], view[..., rank:], self._batch.slot_mapping)
        size = self._batch.block_size
        entries = view[self._slots // size, self._slots % size].to(compressed.dtype)  # [all tokens, 1, dim]
        gathered = entries.transpose(0, 1)[None]
        return gathered[..., :rank], gathered[..., rank:]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: LayerParams) -> torch.Tensor:
        """Attend each row to its own tokens.

        Shapes: query [heads, T, dim], key [heads, all tokens, dim], value [heads, all tokens, v_dim];
            returns [T, heads, v_dim], zero for padding
        """
        if params.softcap is not None or params.sinks is not None:
            raise UnsupportedModel("latents: a softcap or sinks over latents is not supported")
        out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
        for row in range(len(self._starts) - 1):
            tokens = slice(self._query_starts[row], self._query_starts[row + 1])
            keys = slice(self._starts[row], self._starts[row + 1])
            num_queries, num_keys = tokens.stop - tokens.start, keys.stop - keys.start
            mask = None
            if num_queries > 1:
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(
                    num_keys - num_queries
                )
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[None, :, tokens], key[None, :, keys], value[None, :, keys], attn_mask=mask, scale=params.scale
            )
            out[tokens] = attended[0].transpose(0, 1)
        return out
