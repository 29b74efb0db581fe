"""One step of all block tables in one launch: what changed arrives, what a forward pass asks of the tables leaves.

Contract, for the staging buffer of `step_layout` with n live batch positions of rows r_i
    words        every record's columns become its payload, then nulls; its row's live ordinals become [first, count)
    computed_i   staged computed_i + extra_tokens[r_i]; seq_len_i = computed_i + query_len_i
    rows, query_start_loc, seq_lens, zero_start (computed_i == 0), token_rows, positions: as `hybridkv.batch` draws them
    slots        of each token in each group, as `group_meta` defines them, from the tables after this step
    state_slots  [column, i]: the block of a state group's row i in that column, PAD_SLOT_ID for none
    table        [i, k]: the block of ordinal first + k of a row, the null block where that is not live; the first
                 position it holds; this rank's tokens from there on
    csr          indptr, the blocks that rows hold for this rank's tokens from ordinal first on, one row after another,
                 the tokens in each row's last one: all of a block where the row holds none for later tokens
Padding
    tokens: row -1, position 0, slot -1; batch positions: row -1, seq_len 0, query_start_loc flat, states -1, blocks
    null, no pages, `pad_seq_len` tokens

Shapes (R batch positions and T tokens, padding included, S state columns)
    words            [num_words] int32            group_meta   [G, 9] int64, see `GroupMeta`
    staging          [num_staging] int32          index_meta   [G, 10] int64, see `IndexMeta`
    extra_tokens     [num_rows] int32 or None: tokens in the cache that the host does not know of yet, such as accepted
                     draft tokens
    out              `StepOutputs`; every element is written but indices past the last page

Invariants
    I1  records, sorted by group and row, are distinct, lie in their rows and hold final values
    I2  rows in the batch are distinct, in [0, num_rows); query starts rise
    I3  0 <= first <= count <= first + width; columns that are not live read null
    I4  CSR has room for all pages; indices that do not fit are left out
    I5  the staged batch fits R and T; of one that does not, nothing lands outside the outputs

Grid: (num_rows + T // BLOCK + R + 1 + (R + 1) * COLUMN_TILES, G): a program applies a record, maps a tile of tokens or
indexes a batch position. It depends on the padded sizes only, so a captured graph replays with any batch that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._step_kernel import step_kernel
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.group_meta import NUM_META_COLUMNS, GroupMeta
from hybridkv_kernels.step_layout import HEADER_WORDS, NUM_INDEX_COLUMNS, RECORD_WORDS, Header, Record
from hybridkv_kernels.step_reference import StepArrays, step_reference

__all__ = ["StepOutputs", "check_step", "prepare_step", "step", "step_reference"]

_BLOCK = 256


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a step on the device; shapes and dtypes as in the module's contract."""

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    zero_start: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    state_slots: torch.Tensor
    index: torch.Tensor

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    def narrowed(self, num_reqs: int, num_tokens: int) -> StepOutputs:
        """Return views of the first elements, for a batch of these padded sizes."""
        num_states = self.state_slots.shape[0]
        return StepOutputs(
            rows=self.rows[:num_reqs],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            zero_start=self.zero_start[:num_reqs],
            token_rows=self.token_rows[:num_tokens],
            positions=self.positions[:num_tokens],
            slots=self.slots[:, :num_tokens],
            state_slots=self.state_slots.view(-1)[: num_states * num_reqs].view(num_states, num_reqs),
            index=self.index,
        )

    def arrays(self) -> StepArrays:
        """Return the outputs as numpy arrays, views where they are on the CPU."""
        return StepArrays(**{name: tensor.cpu().numpy() for name, tensor in self.named()})


def check_step(
    words: torch.Tensor,
    group_meta: torch.Tensor,
    index_meta: torch.Tensor,
    staging: torch.Tensor,
    *,
    out: StepOutputs,
    num_rows: int,
) -> None:
    """Check the invariants I1, I2 and I5; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    prepare_step(words, group_meta, index_meta, staging, None, out=out, num_rows=num_rows)
    host = staging.cpu().numpy()
    metas = [GroupMeta.from_row(row) for row in group_meta.tolist()]
    num_reqs, num_tokens = int(host[Header.NUM_REQS]), int(host[Header.NUM_TOKENS])
    expect(0 <= num_reqs <= out.rows.shape[0], "staging num_reqs", f"0..{out.rows.shape[0]}", num_reqs)
    expect(0 <= num_tokens <= out.positions.shape[0], "staging num_tokens", f"0..{out.positions.shape[0]}", num_tokens)
    rows = host[host[Header.AT_ROWS] :][:num_reqs].tolist()
    distinct = len(set(rows)) == num_reqs and all(0 <= row < num_rows for row in rows)
    expect(distinct, "staging rows", f"distinct ones in 0..{num_rows - 1}", rows)
    starts = host[host[Header.AT_QUERY_STARTS] :][: num_reqs + 1].tolist()
    expect(starts == sorted(starts) and starts[-1] == num_tokens, "staging query starts", "rising ones", starts)
    at = host[Header.AT_GROUP_STARTS]
    for group, meta in enumerate(metas):
        begin, end = int(host[at + group]), int(host[at + group + 1])
        records = host[host[Header.AT_RECORDS] :][begin * RECORD_WORDS : end * RECORD_WORDS].reshape(-1, RECORD_WORDS)
        numbers = records[:, Record.ROW].tolist()
        rising = numbers == sorted(set(numbers)) and all(0 <= row < num_rows for row in numbers)
        expect(rising, f"records of group {group}: rows", f"rising ones in 0..{num_rows - 1}", numbers)
        for record in records.tolist():
            low, num_words, num_payload = record[Record.LOW], record[Record.NUM_WORDS], record[Record.NUM_PAYLOAD]
            inside = low >= 0 and 0 <= num_payload <= num_words and low + num_words <= meta.width
            name = f"record of group {group} row {record[Record.ROW]}"
            expect(inside, name, f"columns in 0..{meta.width}", (low, num_words, num_payload))
            first, count = record[Record.FIRST], record[Record.COUNT]
            expect(0 <= first <= count <= first + meta.width, name, "a live range that fits the row", (first, count))


def prepare_step(
    words: torch.Tensor,
    group_meta: torch.Tensor,
    index_meta: torch.Tensor,
    staging: torch.Tensor,
    extra_tokens: torch.Tensor | None,
    *,
    out: StepOutputs,
    num_rows: int,
    max_columns: int = _BLOCK,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `step` runs.

    Shapes, dtypes: as in the module's contract. `num_rows` is the rows a table has, `max_columns` the widest row
    among state groups and page indices.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    num_groups, num_reqs, num_tokens = group_meta.shape[0], out.rows.shape[0], out.positions.shape[0]
    expect_tensor("words", words, torch.int32, (None,))
    expect_tensor("group_meta", group_meta, torch.int64, (num_groups, NUM_META_COLUMNS))
    expect_tensor("index_meta", index_meta, torch.int64, (num_groups, NUM_INDEX_COLUMNS))
    expect_tensor("staging", staging, torch.int32, (None,))
    expect(staging.shape[0] >= HEADER_WORDS, "staging.shape[0]", f"at least {HEADER_WORDS}", staging.shape[0])
    named = [("words", words), ("group_meta", group_meta), ("index_meta", index_meta), ("staging", staging)]
    if extra_tokens is not None:
        expect_tensor("extra_tokens", extra_tokens, torch.int32, (num_rows,))
        named.append(("extra_tokens", extra_tokens))
    shapes = {
        "rows": (torch.int32, (num_reqs,)),
        "query_start_loc": (torch.int32, (num_reqs + 1,)),
        "seq_lens": (torch.int32, (num_reqs,)),
        "zero_start": (torch.bool, (num_reqs,)),
        "token_rows": (torch.int32, (num_tokens,)),
        "positions": (torch.int64, (num_tokens,)),
        "slots": (torch.int64, (num_groups, num_tokens)),
        "state_slots": (torch.int64, (None, num_reqs)),
        "index": (torch.int32, (None,)),
    }
    for name, tensor in out.named():
        dtype, shape = shapes[name]
        expect_tensor(f"out.{name}", tensor, dtype, shape)
        if name != "slots":
            named.append((f"out.{name}", tensor))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect(num_tokens <= 1 or out.slots.stride(1) == 1, "out.slots.stride(1)", 1, out.slots.stride(1))
    expect_one_device([*named, ("out.slots", out.slots)])
    num_tiles = num_tokens // _BLOCK + num_reqs + 1
    column_tiles = max(1, -(-max_columns // _BLOCK))
    return Launch(
        name="step",
        kernel=step_kernel,
        grid=(num_rows + num_tiles + (num_reqs + 1) * column_tiles, num_groups, 1),
        args=(
            words,
            group_meta,
            index_meta,
            staging,
            staging if extra_tokens is None else extra_tokens,
            *(tensor for _, tensor in out.named()),
            num_rows,
            num_tiles,
            num_reqs,
            num_tokens,
            out.slots.stride(0),
        ),
        options={
            "HAS_EXTRA": extra_tokens is not None,
            "COLUMN_TILES": column_tiles,
            "BLOCK": _BLOCK,
            "num_warps": 4,
        },
    )


def step(
    words: torch.Tensor,
    group_meta: torch.Tensor,
    index_meta: torch.Tensor,
    staging: torch.Tensor,
    extra_tokens: torch.Tensor | None,
    *,
    out: StepOutputs,
    num_rows: int,
    max_columns: int = _BLOCK,
) -> None:
    """Run a step with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract, `num_rows` and `max_columns` as in `prepare_step`.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    launch = prepare_step(
        words, group_meta, index_meta, staging, extra_tokens, out=out, num_rows=num_rows, max_columns=max_columns
    )
    launch.run()
