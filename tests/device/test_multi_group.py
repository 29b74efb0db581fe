"""Claims about the tables of all groups, their device mirror and the slots of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.errors import SpecError
from hybridkv.manager import CacheManager
from hybridkv.multi_group import ExtraTokens, MultiGroupBlockTable
from hybridkv.page_index import PageIndexRequest
from hybridkv.plan import SlotMappingMode
from hybridkv.table_arrays import TableShape
from tests.host_paths import PATHS, using
from tests.models import chunked_and_full, gemma_like, limits, plan_slabs, state_and_attention
from tests.snapshots import snapshot

BOTH_HOST_PATHS = True
FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE


def three_groups(device: torch.device | str = "cpu") -> MultiGroupBlockTable:
    """Four rows of a full group (blocks of 4, 6 wide), a ring (blocks of 2, 3 wide) and states (1 wide)."""
    tables = [BlockTable(4, 6, 4, FULL), BlockTable(4, 3, 2, RING), BlockTable(4, 1, 1, NONE)]
    return MultiGroupBlockTable(tables, 16, device)


def mirror(tables: MultiGroupBlockTable) -> list[list[list[int]]]:
    """The committed tables, as lists."""
    return [tables.block_table(group).cpu().tolist() for group in range(tables.num_groups)]


def slots(tables: MultiGroupBlockTable, *args: list[int], **padded: int) -> list[list[int]]:
    """The slots of a step over rows, scheduled and computed tokens."""
    return tables.step(*args, **padded).slot_mapping.cpu().tolist()


def test_one_call_fills_a_row_in_every_group(device: torch.device) -> None:
    """Block ids of three groups, one step: slots of every token in every group's own numbering, states' blocks."""
    tables = three_groups(device)
    tables.append_row(2, [[5, 3], [7, 8, 9], [4]])
    step = tables.step([2], [6], [0])
    assert step.slot_mapping.tolist() == [[20, 21, 22, 23, 12, 13], [14, 15, 16, 17, 18, 19], [-1] * 6]
    assert step.state_slots(2).tolist() == [[4]]
    assert mirror(tables)[2] == [[0], [0], [4], [0]]


def test_positions_outside_the_live_range_give_pad(device: torch.device) -> None:
    """A dropped head, an unreserved tail and a row of another batch give -1, never a neighbour's entry."""
    tables = three_groups(device)
    tables.append_row(0, [[5], [7, 8, 9], [4]])
    tables.append_row(1, [[6, 2], [1, 2, 3], [5]])
    tables.tables[1].drop_row_head(0, 2)
    assert slots(tables, [0], [10], [0])[:2] == [[20, 21, 22, 23] + [-1] * 6, [-1] * 4 + [18, 19] + [-1] * 4]
    assert slots(tables, [3], [3], [0]) == [[-1] * 3] * 3


def test_a_ring_maps_the_ordinals_it_holds(device: torch.device) -> None:
    """Ordinal 3 of a ring of 3 is in column 0; ordinal 0, which was there before, is dead."""
    tables = three_groups(device)
    tables.append_row(0, [[], [7, 8, 9], []])
    tables.tables[1].drop_row_head(0, 1)
    tables.append_row(0, [[], [11], []])
    assert slots(tables, [0], [9], [0])[1] == [-1, -1, 16, 17, 18, 19, 22, 23, -1]
    assert mirror(tables)[1][0] == [11, 8, 9]


def test_padding_maps_to_pad(device: torch.device) -> None:
    """Tokens beyond the batch get -1 in every group, also where an earlier step left slots."""
    tables = three_groups(device)
    tables.append_row(0, [[5, 6], [7, 8, 9], [4]])
    assert slots(tables, [0], [6], [0])[0] == [20, 21, 22, 23, 24, 25]
    assert slots(tables, [0], [1], [2], num_reqs_padded=3, num_tokens_padded=6)[:2] == [
        [22, -1, -1, -1, -1, -1],
        [16, -1, -1, -1, -1, -1],
    ]


def test_states_have_a_slot_a_column_and_batch_position(device: torch.device) -> None:
    """Row c of the states' slots is column c of every batch position: -1 for no block and for padding."""
    tables = MultiGroupBlockTable(
        [BlockTable(4, 2, 1, NONE), BlockTable(4, 2, 4), BlockTable(4, 3, 1, NONE)], 8, device
    )
    tables.append_row(3, [[5, 6], [1], [7, 8, 9]])
    tables.append_row(1, [[4], [], []])
    step = tables.step([3, 1], [1, 1], [0, 0], num_reqs_padded=3)
    assert step.state_slots(0).tolist() == [[5, 4, -1], [6, -1, -1]]
    assert step.state_slots(2).tolist() == [[7, -1, -1], [8, -1, -1], [9, -1, -1]]
    assert step.state_slots(0).dtype == torch.int64
    with pytest.raises(ValueError, match="group 1: keeps tokens, whose slots are in slot_mapping"):
        step.state_slots(1)


def test_only_the_page_indices_that_were_asked_for_are_there(device: torch.device) -> None:
    """A group's local table and CSR exist where the tables were made to write them; elsewhere the error says so."""
    groups = [BlockTable(4, 6, 4, FULL), BlockTable(4, 3, 2, RING), BlockTable(4, 1, 1, NONE)]
    requests = {0: PageIndexRequest(csr=True), 1: PageIndexRequest(block_table=True)}
    tables = MultiGroupBlockTable(groups, 16, device, page_indices=requests)
    tables.append_row(2, [[5, 3], [7, 8, 9], [4]])
    tables.tables[1].drop_row_head(2, 1)
    step = tables.step([2], [2], [4], num_reqs_padded=2)
    csr, local = step.csr(0), step.local_table(1)
    assert (csr.indptr.tolist(), csr.indices[:2].tolist()) == ([0, 2, 2], [5, 3])
    assert csr.last_page_len.tolist() == [2, 0]
    assert local.block_table.tolist() == [[8, 9, 0], [0, 0, 0]]
    assert (local.first_positions.tolist(), local.seq_lens.tolist()) == ([2, 0], [4, 0])
    for call in (lambda: step.csr(1), lambda: step.csr_cpu(1), lambda: step.local_table(0)):
        with pytest.raises(ValueError, match="name it in page_indices"):
            call()
    for call in (lambda: step.csr(2), lambda: step.local_table(2)):
        with pytest.raises(ValueError, match="group 2: keeps states, whose slots are in state_slots"):
            call()
    for read in (step.csr, step.csr_cpu, step.local_table, step.state_slots):
        for group in (-1, 3):
            with pytest.raises(ValueError, match=rf"group: got {group}, expected 0\.\.2"):
                read(group)
    for group, message in ((2, "group 2 keeps states"), (3, r"got group 3, the groups are 0\.\.2")):
        with pytest.raises(ValueError, match=message):
            MultiGroupBlockTable(groups, 16, device, page_indices={group: PageIndexRequest(csr=True)})


def test_the_slots_are_a_view_of_one_buffer(device: torch.device) -> None:
    """Every step writes to the same addresses, so a captured graph may keep them."""
    tables = three_groups(device)
    first = tables.step([0], [3], [0]).slot_mapping
    second = tables.step([1], [7], [0]).slot_mapping
    assert first.data_ptr() == second.data_ptr()
    assert (first.dtype, first.shape, second.shape) == (torch.int64, (3, 3), (3, 7))


def test_the_mirror_changes_at_commit_and_at_every_step(device: torch.device) -> None:
    """Row operations leave the device alone; `commit` or the next step, of any batch, brings all of them there."""
    tables = three_groups(device)
    tables.append_row(0, [[5], [7], [4]])
    assert not tables.words.any()
    tables.commit()
    assert mirror(tables)[0][0] == [5, 0, 0, 0, 0, 0]
    tables.append_row(1, [[6], [8], [3]])
    assert mirror(tables)[0][1] == [0] * 6
    assert slots(tables, [0], [1], [0]) == [[20], [14], [-1]]
    assert torch.equal(tables.words.cpu(), torch.from_numpy(tables.arrays.words))
    tables.clear_row(0)
    assert slots(tables, [0, 1], [1, 1], [0, 0]) == [[-1, 24], [-1, 16], [-1, -1]]


def test_rows_outside_the_batch_are_clean_after_commit(device: torch.device) -> None:
    """A row cleared beside a batch of other rows reads null on the device after the same commit."""
    tables = three_groups(device)
    for row in (0, 3):
        tables.append_row(row, [[5 + row], [7 + row, 20 + row], [4 + row]])
    slots(tables, [0, 3], [1, 1], [0, 0])
    held = tables.clear_row(3)
    assert [ids.tolist() for ids in held] == [[8], [10, 23], [7]]
    slots(tables, [0], [1], [1])
    assert [rows[3] for rows in mirror(tables)] == [[0] * 6, [0] * 3, [0]]
    assert [rows[0] for rows in mirror(tables)] == [[5, 0, 0, 0, 0, 0], [7, 20, 0], [4]]
    assert slots(tables, [3], [2], [0]) == [[-1, -1]] * 3


def test_only_what_changed_travels() -> None:
    """A steady step copies no more than a block id and a live range; one that changes nothing copies nothing."""
    tables = three_groups()
    tables.append_row(1, [[5], [7], [4]])
    tables.commit()
    assert 3 <= tables.num_words_copied <= 9
    tables.commit()
    assert tables.num_words_copied == 0
    tables.append_row(1, [[6], [], []])
    tables.step([0], [1], [0])
    assert 1 <= tables.num_words_copied <= 3
    tables.step([1], [1], [0])
    assert (tables.num_words_copied, tables.num_rounds) == (0, 1)


def test_moved_and_swapped_rows_arrive_in_every_group(device: torch.device) -> None:
    """Moving and swapping changes all groups' rows alike, on the device too; the source reads null."""
    tables = three_groups(device)
    tables.append_row(0, [[1, 2], [3], [4]])
    tables.append_row(1, [[5], [6, 7, 8], [9]])
    tables.swap_row(0, 1)
    tables.move_row(1, 3)
    tables.commit()
    assert mirror(tables) == [
        [[5, 0, 0, 0, 0, 0], [0] * 6, [0] * 6, [1, 2, 0, 0, 0, 0]],
        [[6, 7, 8], [0] * 3, [0] * 3, [3, 0, 0]],
        [[9], [0], [0], [4]],
    ]


def test_add_row_replaces_in_every_group(device: torch.device) -> None:
    """`add_row` leaves nothing of the row's old blocks in any group."""
    tables = three_groups(device)
    tables.append_row(0, [[1, 2, 3], [4, 5, 6], [7]])
    tables.add_row(0, [[8], [], [9]])
    tables.commit()
    assert [rows[0] for rows in mirror(tables)] == [[8, 0, 0, 0, 0, 0], [0, 0, 0], [9]]


REFUSED: list[tuple[str, Callable[[MultiGroupBlockTable], object]]] = [
    ("group 1 row 0: would hold 4 blocks", lambda tables: tables.append_row(0, [[1], [2], []])),
    ("group 2 row 0: would hold 2 blocks", lambda tables: tables.append_row(0, [[1], [], [2]])),
    ("group 2 row 0: would hold 2 blocks", lambda tables: tables.add_row(0, [[1], [2], [3, 4]])),
    ("group 0 row 1: would hold 7 blocks", lambda tables: tables.add_row(1, [[1], [2], [3]], [6, 9, 0])),
    ("expected 3 ordinals", lambda tables: tables.add_row(1, [[1], [2], [3]], [0, 0])),
    ("expected 3 ordinals of at least 0", lambda tables: tables.add_row(1, [[1], [2], [3]], [0, -1, 0])),
    ("first_blocks: got 2147483647", lambda tables: tables.add_row(1, [[], [2], []], [0, 2**31 - 1, 0])),
    ("first_blocks: got 1099511627776", lambda tables: tables.add_row(1, [[], [2], []], [0, 2**40, 0])),
    ("first_block: got 4 for group 1 row 0", lambda tables: tables.drop_row_head(0, [1, 4, 0])),
    ("first_block: got -1 for group 2 row 0", lambda tables: tables.drop_row_head(0, [1, 1, -1])),
    ("first_blocks: got float64", lambda tables: tables.drop_row_head(0, [1, 1.5, 0])),
    ("got 2 ordinals, expected 3", lambda tables: tables.drop_row_head(0, [1, 1])),
    ("0 is the null block", lambda tables: tables.append_row(1, [[1], [2], [0]])),
    ("0 is the null block", lambda tables: tables.add_row(0, [[1], [2], [0]])),
    ("got lists for 2 groups, expected 3", lambda tables: tables.append_row(1, [[1], [2]])),
    ("got lists for 4 groups, expected 3", lambda tables: tables.add_row(1, [[1], [2], [3], [4]])),
    ("row: got 4", lambda tables: tables.append_row(4, [[1], [2], [3]])),
    ("row: got -1", lambda tables: tables.add_row(-1, [[1], [2], [3]])),
    ("row: got 4", lambda tables: tables.clear_row(4)),
    ("row: got 9", lambda tables: tables.move_row(0, 9)),
    ("row: got 9", lambda tables: tables.swap_row(0, 9)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[f"{idx}" for idx in range(len(REFUSED))])
def test_one_groups_refusal_leaves_all_groups(message: str, call: Callable[[MultiGroupBlockTable], object]) -> None:
    """If any group refuses its list, no group changes and nothing is left to commit."""
    tables = three_groups()
    tables.append_row(0, [[1, 2], [3, 4, 5], [6]])
    tables.commit()
    before = snapshot(tables.tables)
    with pytest.raises(ValueError, match=message):
        call(tables)
    assert snapshot(tables.tables) == before
    tables.commit()
    assert tables.num_words_copied == 0


def test_batches_the_tables_were_not_made_for_are_refused(device: torch.device) -> None:
    """More tokens or positions than planned, padding included, or a row that no table has: a `ValueError`, no step."""
    tables = three_groups(device)
    assert len(slots(tables, [0], [16], [0])[0]) == 16
    tables.append_row(0, [[5], [7], [4]])
    with pytest.raises(ValueError, match="batch: got 17 tokens, the tables were made for 16"):
        tables.step([0], [1], [0], num_tokens_padded=17)
    with pytest.raises(ValueError, match="batch: got row 4, the tables have 4"):
        tables.step([0, 4], [1, 1], [0, 0])
    with pytest.raises(ValueError, match="batch: got 5 batch positions, the tables have 4 rows"):
        tables.step([0], [1], [0], num_reqs_padded=5)
    with pytest.raises(ValueError, match="at least one token a row"):
        tables.step([0], [0], [0])
    assert not tables.words.any()
    tables.commit()
    assert mirror(tables)[0][0] == [5, 0, 0, 0, 0, 0]


def test_more_pages_than_csr_has_room_for_are_refused(device: torch.device) -> None:
    """What the rows of a batch hold for its lengths, extra tokens included, must fit `max_pages`; nothing changes."""
    requests = {0: PageIndexRequest(csr=True, max_pages=3)}
    tables = MultiGroupBlockTable([BlockTable(4, 6, 4)], 16, device, page_indices=requests)
    tables.append_row(0, [[5, 6, 7, 8]])
    tables.append_row(1, [[9]])
    assert tables.step([0, 1], [1, 1], [7, 15]).csr(0).indptr.tolist() == [0, 2, 3]
    tables.append_row(2, [[4]])
    extra = ExtraTokens(torch.zeros(4, dtype=torch.int32, device=device), 1)
    for arguments, more in (([[0], [1], [12]], None), ([[0, 1], [1, 1], [7, 0]], extra)):
        with pytest.raises(ValueError, match="group 0: got a batch of 4 pages, max_pages is 3"):
            tables.step(*arguments, extra=more)
    assert not tables.block_table(0)[2].any()


def test_the_last_wrapper_has_the_mirror(device: torch.device) -> None:
    """Tables wrapped again arrive whole in the new mirror, and the old wrapper refuses to stage and to commit."""
    groups = BlockTable.of_groups(4, [TableShape(6, 4), TableShape(3, 2, RING), TableShape(1, 1, NONE)])
    first = MultiGroupBlockTable(groups, 16, device)
    first.add_row(1, [[5, 3], [7, 8, 9], [4]], [0, 2, 0])
    first.add_row(2, [[], [], []], [0, 4, 0])
    first.commit()
    second = MultiGroupBlockTable(groups, 16, device)
    second.append_row(3, [[6], [], []])
    for call in (first.commit, lambda: first.stage([1], [1], [0]), lambda: first.step([1], [1], [0])):
        with pytest.raises(ValueError, match="taken over by a later MultiGroupBlockTable"):
            call()
    assert slots(second, [1, 3], [1, 2], [4, 0]) == [[12, 24, 25], [14, -1, -1], [-1] * 3]
    assert torch.equal(second.words.cpu(), torch.from_numpy(second.arrays.words))


def test_a_wrapped_table_is_not_joined_into_others() -> None:
    """A table that has a wrapper cannot move into another's arrays; the wrapper goes on."""
    table = BlockTable(4, 6, 4)
    alone = MultiGroupBlockTable([table], 16)
    with pytest.raises(ValueError, match="wrapped alone already"):
        MultiGroupBlockTable([table, BlockTable(4, 3, 2)], 16)
    table.append_row(0, [5])
    alone.commit()
    assert mirror(alone)[0][0] == [5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("rows", [(), (4, 5)])
def test_tables_must_have_equal_rows(rows: tuple[int, ...]) -> None:
    """A model has at least one group, and all groups have the same rows."""
    with pytest.raises(ValueError, match="expected at least one table, equal rows"):
        MultiGroupBlockTable([BlockTable(num_rows, 2, 4) for num_rows in rows], 8)


def test_from_spec_is_one_call(device: torch.device) -> None:
    """A model's layer spec becomes tables, mirror and slots in one call, with the plan's widths and modes."""
    tables = MultiGroupBlockTable.from_spec(gemma_like(), 2**20, limits(), block_size={0: 4, 1: 8}, device=device)
    assert [(t.block_size, t.width, t.mode) for t in tables.tables] == [(4, 5, RING), (8, 8, FULL)]
    assert tables.device == device
    tables.add_row(1, [[3, 4], [2]])
    assert slots(tables, [1], [8], [0]) == [[12, 13, 14, 15, 16, 17, 18, 19], [16, 17, 18, 19, 20, 21, 22, 23]]
    with pytest.raises(SpecError, match="memory"):
        MultiGroupBlockTable.from_spec(gemma_like(), 100, limits())


def test_a_managers_tables_are_shared(device: torch.device) -> None:
    """Blocks that a `CacheManager` reserves appear in the slots of the wrapped tables."""
    plan = plan_slabs(state_and_attention(), 8)
    manager = CacheManager(plan)
    tables = MultiGroupBlockTable.from_plan(plan, tables=manager.tables, device=device)
    row = manager.admit(6).admitted_row
    manager.reserve([row], [6])
    block_ids = manager.tables[1].row_block_ids(row).tolist()
    assert slots(tables, [row], [6], [0]) == [
        [-1] * 6,
        [block_ids[position // 4] * 4 + position % 4 for position in range(6)],
    ]
    assert mirror(tables)[0][row] == manager.tables[0].row_block_ids(row).tolist()


def test_block_tables_are_views_of_the_mirror(device: torch.device) -> None:
    """`block_table` needs no second call after a commit, and leaves out the padding of a row."""
    tables = three_groups(device)
    full = tables.block_table(0)
    assert (full.shape, full.dtype, full.stride(1)) == ((4, 6), torch.int32, 1)
    tables.append_row(3, [[9], [], []])
    tables.commit()
    assert full.cpu().tolist()[3] == [9, 0, 0, 0, 0, 0]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), path=st.sampled_from(PATHS))
def test_slots_equal_the_definition_after_any_history(data: st.DataObject, path: str) -> None:
    """After any row operations in full, ring and state groups a step's slots are those that `GroupMeta` defines."""
    with using(path):
        tables = three_groups()
    for _ in range(data.draw(st.integers(1, 12))):
        row, other = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        match data.draw(st.sampled_from(["append", "append", "add", "clear", "move", "swap", "drop", "commit"])):
            case "append" | "add" as verb:
                ids = [data.draw(st.lists(st.integers(1, 500), max_size=table.width)) for table in tables.tables]
                try:
                    tables.append_row(row, ids) if verb == "append" else tables.add_row(row, ids)
                except ValueError:
                    continue
            case "clear":
                tables.clear_row(row)
            case "move":
                tables.move_row(row, other)
            case "swap":
                tables.swap_row(row, other)
            case "drop":
                ring = tables.tables[1]
                ring.drop_row_head(
                    row, data.draw(st.integers(int(ring.first_block_per_row[row]), int(ring.num_blocks_per_row[row])))
                )
            case "commit":
                tables.commit()
    rows = data.draw(st.permutations(range(4)))[: data.draw(st.integers(0, 4))]
    scheduled = [data.draw(st.integers(1, 3)) for _ in rows]
    computed = [data.draw(st.integers(0, 26)) for _ in rows]
    step = tables.step(rows, scheduled, computed, num_reqs_padded=4, num_tokens_padded=data.draw(st.integers(12, 16)))
    words, geometry = tables.words.tolist(), step.geometry
    tokens = list(zip(geometry.token_rows_cpu.tolist(), geometry.positions_cpu.tolist(), strict=True))
    for meta, mapped in zip(tables.arrays.group_metas, step.slot_mapping.tolist(), strict=True):
        assert mapped == [meta.slot(words, *token) for token in tokens]
        assert set(mapped[geometry.num_tokens :]) <= {-1}
    for group, table in enumerate(tables.tables):
        assert np.array_equal(tables.block_table(group).numpy(), table.entries[:, : table.width])


def test_slots_follow_a_sequence_through_a_chunked_model() -> None:
    """Decoding through chunks, each new token's slot lies in the block that its row holds for its position."""
    plan = plan_slabs(chunked_and_full(6), 30)
    manager = CacheManager(plan)
    tables = MultiGroupBlockTable.from_plan(plan, tables=manager.tables)
    row = manager.admit(1, 40).admitted_row
    for position in range(40):
        manager.reserve([row], [1])
        mapped = slots(tables, [row], [1], [position])
        assert np.array_equal(tables.words.numpy(), tables.arrays.words)
        for group, table in enumerate(manager.tables):
            held = table.row_block_ids(row)[position // 4 - table.first_block_per_row[row]]
            assert mapped[group] == [held * 4 + position % 4]
        manager.commit([row], [1])


def test_windows_move_on_in_all_groups_or_in_none() -> None:
    """`drop_row_head` and `add_row` with first ordinals act on every group; a refusal of one changes none."""
    tables = MultiGroupBlockTable([BlockTable(2, 4, 4), BlockTable(2, 4, 4)], 8)
    tables.add_row(0, [[1, 2, 3], [4, 5]], [0, 2])
    assert tables.num_blocks_per_row[:, 0].tolist() == [3, 4]
    with pytest.raises(ValueError, match="first_block: got 5 for group 1 row 0, which has 4 ordinals"):
        tables.drop_row_head(0, [1, 5])
    assert tables.first_block_per_row[:, 0].tolist() == [0, 2]
    assert [ids.tolist() for ids in tables.drop_row_head(0, [1, 3])] == [[1], [4]]
    assert tables.first_block_per_row[:, 0].tolist() == [1, 3]
    with pytest.raises(ValueError, match="first_blocks"):
        tables.drop_row_head(0, [1])
    with pytest.raises(ValueError, match="first_blocks"):
        tables.add_row(0, [[1], [1]], [0, -1])
    with pytest.raises(ValueError, match=r"expected 0\.\.1"):
        tables.drop_row_head(2, [0, 0])
