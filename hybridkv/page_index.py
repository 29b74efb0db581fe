"""Which page indices a step writes for each group, where they lie, and what they look like to a kernel."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays
from hybridkv_kernels.step_layout import IndexMeta
from hybridkv_kernels.step_numpy import local_lens, page_counts


@dataclass(frozen=True)
class PageIndexRequest:
    """What one group's kernels want in every step.

    Attributes:
        block_table: a table by batch position that begins at the row's first live ordinal, as FlashAttention reads it;
            for a full-attention group it is as large as the block table itself.
        csr: the pages of all rows one after another, as FlashInfer reads them.
        pad_seq_len: what the table's lengths hold for padding, 0 or 1.
        max_pages: room for the pages of a batch in CSR form; every column of every row by default. A batch whose rows
            hold more is refused.
    """

    block_table: bool = False
    csr: bool = False
    pad_seq_len: int = 0
    max_pages: int | None = None

    def __post_init__(self) -> None:
        if self.pad_seq_len not in (0, 1):
            raise ValueError(f"pad_seq_len: got {self.pad_seq_len}, expected 0 or 1")
        if self.max_pages is not None and self.max_pages < 1:
            raise ValueError(f"max_pages: got {self.max_pages}, expected at least 1")


@dataclass(frozen=True)
class LocalTable:
    """One group's blocks by batch position, from each row's first live ordinal on.

    A kernel that counts positions from 0 reads position p of a sequence at `p - first_positions[i]`.

    Shapes (R batch positions, padding included):
        block_table      [R, width] int32, null where there is no block
        first_positions  [R] int32, the sequence's position of the table's first token; over all ranks
        seq_lens         [R] int32, tokens from there on, of this rank; `pad_seq_len` for padding. They follow from the
                         batch: of a row that holds fewer blocks, the last of these tokens are in null blocks
    """

    block_table: torch.Tensor
    first_positions: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class CsrTable:
    """One group's blocks in compressed rows: those that a row's tokens need and the row holds.

    Shapes (R batch positions, padding included):
        indptr         [R+1] int32, where each row's blocks begin; flat in the padding
        indices        [max_pages] int32, those past `indptr[R]` are left over
        last_page_len  [R] int32, tokens in a row's last block, 1..block_size; 0 for a row without blocks
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


class IndexBuffer:
    """The page indices of all groups, one int32 buffer at a fixed address.

    Attributes:
        metas: one `IndexMeta` a group.
        num_words: words of the buffer.
        num_state_rows: rows of the states' slots.
        max_columns: the widest row that a program writes.
    """

    def __init__(self, arrays: TableArrays, requests: Mapping[int, PageIndexRequest], max_num_reqs: int) -> None:
        unknown = sorted(set(requests) - set(range(arrays.num_groups)))
        if unknown:
            raise ValueError(f"page_indices: got group {unknown[0]}, the groups are 0..{arrays.num_groups - 1}")
        self.num_words = self.num_state_rows = 0
        self.metas: list[IndexMeta] = []
        for group, meta in enumerate(arrays.group_metas):
            request = requests.get(group, PageIndexRequest())
            if meta.block_size == 0:
                if request.block_table or request.csr:
                    raise ValueError(f"page_indices: group {group} keeps states, which have slots but no pages")
                self.metas.append(IndexMeta(state_row=self.num_state_rows))
                self.num_state_rows += meta.width
                continue
            places: dict[str, int] = {"pad_seq_len": request.pad_seq_len}
            if request.block_table:
                places |= {"table_width": meta.width, "table_at": self._take(max_num_reqs * meta.width)}
                places |= {"first_at": self._take(max_num_reqs), "len_at": self._take(max_num_reqs)}
            if request.csr:
                num_indices = request.max_pages or max_num_reqs * meta.width
                places |= {"num_indices": num_indices, "indptr_at": self._take(max_num_reqs + 1)}
                places |= {"indices_at": self._take(num_indices), "last_at": self._take(max_num_reqs)}
            self.metas.append(IndexMeta(**places))
        widths = [
            arrays.shapes[g].width
            for g, index in enumerate(self.metas)
            if max(index.state_row, index.table_at, index.indptr_at) >= 0
        ]
        self.max_columns = max(widths, default=1)
        self._arrays = arrays
        # All other groups have room for whatever their rows hold.
        self._tight = [
            g for g, meta in enumerate(self.metas) if 0 < meta.num_indices < max_num_reqs * arrays.shapes[g].width
        ]

    def check_room(self, batch: StepBatch, most_extra: int) -> None:
        """Raise ValueError if the pages of a batch whose rows may be `most_extra` longer do not fit a group's CSR."""
        for group in self._tight:
            num_pages = int(host_pages(self._arrays, group, batch.rows, batch.seq_lens + most_extra)[0].sum())
            room = self.metas[group].num_indices
            if num_pages > room:
                raise ValueError(
                    f"page_indices: group {group}: got a batch of {num_pages} pages, max_pages is {room}; make tables "
                    "with room for more, or schedule fewer rows"
                )

    def _take(self, num_words: int) -> int:
        """Return where the next words begin; starts are multiples of 4 words, as vector loads like them."""
        begin = self.num_words
        self.num_words += -(-num_words // 4) * 4
        return begin


def host_pages(
    arrays: TableArrays, group: int, rows: NDArray[np.int64], seq_lens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many pages rows of `seq_lens` tokens have in CSR, and the tokens in the last ones, as the host knows.

    Shapes: rows, seq_lens [n] -> [n], [n]
    """
    meta, first = arrays.group_metas[group], arrays.first[group, rows].astype(np.int64)
    return page_counts(meta, local_lens(meta, seq_lens, first), arrays.count[group, rows] - first)


def local_table(words: torch.Tensor, meta: IndexMeta, num_reqs: int) -> LocalTable:
    """Return one group's table as views of the buffer."""
    table = _part(words, meta.table_at, num_reqs * meta.table_width).view(num_reqs, meta.table_width)
    return LocalTable(table, _part(words, meta.first_at, num_reqs), _part(words, meta.len_at, num_reqs))


def csr_table(words: torch.Tensor, meta: IndexMeta, num_reqs: int) -> CsrTable:
    """Return one group's compressed rows as views of the buffer."""
    return CsrTable(
        _part(words, meta.indptr_at, num_reqs + 1),
        _part(words, meta.indices_at, meta.num_indices),
        _part(words, meta.last_at, num_reqs),
    )


def _part(words: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    return words[begin : begin + size]
