"""Attention over the cache with the Triton paged kernel, for GPUs."""

from dataclasses import dataclass

from hybridkv._torch import torch
from hybridkv.arena import KVLayout
from hybridkv.attention.base import GroupBatch, LayerParams
from hybridkv_kernels.kv_write import write_kv
from hybridkv_kernels.paged_attention import AttentionParams, PagedBatch, paged_attention, recommended_num_splits


@dataclass(frozen=True)
class PreparedPages:
    """A group's pages for one step, in the kernel's own form."""

    batch: GroupBatch
    pages: PagedBatch
    kv_layout: KVLayout

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        params: LayerParams,
    ) -> torch.Tensor:
        """Write, then attend; shapes as in `PreparedAttention.attend`."""
        batch = self.batch
        if key is not None and value is not None:
            write_kv(key, value, *caches, batch.slot_mapping, layout=self.kv_layout)
        out = query.new_zeros(*query.shape[:2], caches[1].shape[-1])
        geometry = batch.geometry
        # Decodes of few rows leave a GPU idle unless several programs share one row's keys.
        num_tiles = geometry.num_reqs * caches[0].shape[2 if self.kv_layout == "NHD" else 1]
        num_splits = 1
        if geometry.max_query_len == 1:
            num_splits = recommended_num_splits(num_tiles, geometry.max_seq_len, _num_processors(query.device))
        kernel_params = AttentionParams(
            scale=params.scale,
            width=batch.block_table.shape[1],
            max_query_len=max(1, geometry.max_query_len),
            window=batch.window,
            chunk=batch.chunk,
            softcap=params.softcap,
            layout=self.kv_layout,
            num_splits=num_splits,
        )
        paged_attention(query, *caches, self.pages, kernel_params, out=out, sinks=params.sinks)
        return out


class TritonBackend:
    """One launch writes, one attends; decode rows and prefill chunks share the batch."""

    def __init__(self, kv_layout: KVLayout = "NHD") -> None:
        self.kv_layout: KVLayout = kv_layout

    def prepare(self, batch: GroupBatch) -> PreparedPages:
        """Hand the group's device table to the kernel; nothing is computed."""
        geometry = batch.geometry
        return PreparedPages(
            batch,
            PagedBatch(batch.block_table, geometry.rows, geometry.query_start_loc, geometry.seq_lens),
            self.kv_layout,
        )


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
