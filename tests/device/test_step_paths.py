"""Claims about how steps reach the device: rounds, addresses, failures, tokens that only the device knows of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hybridkv.block_table import BlockTable
from hybridkv.multi_group import ExtraTokens, MultiGroupBlockTable, TableStep
from hybridkv.page_index import PageIndexRequest
from hybridkv.plan import SlotMappingMode
from hybridkv.step_path import TritonPath
from hybridkv.table_arrays import TableShape
from hybridkv_kernels.step_layout import HEADER_WORDS, RECORD_WORDS

FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
MAX_TOKENS = 16
BOTH_HOST_PATHS = True
INDICES = {0: PageIndexRequest(csr=True), 1: PageIndexRequest(block_table=True)}

both_paths = pytest.mark.parametrize("use_triton", [False, True], ids=["numpy", "triton"])


def make(use_triton: bool, device: torch.device, num_rows: int = 2) -> MultiGroupBlockTable:
    """Tables of a full group (blocks of 4, 6 wide), a ring (blocks of 2, 3 wide) and states (2 wide)."""
    if device.type != "cpu" and not use_triton:
        pytest.skip("the numpy path is a CPU's")
    tables = BlockTable.of_groups(num_rows, [TableShape(6, 4), TableShape(3, 2, RING), TableShape(2, 1, NONE)])
    return MultiGroupBlockTable(tables, MAX_TOKENS, device, page_indices=INDICES, use_triton=use_triton)


def cut(tables: MultiGroupBlockTable, capacity: int) -> None:
    """Let a staging buffer hold so few words of payload."""
    assert isinstance(tables._path, TritonPath)
    tables._path._capacity = capacity


def is_committed(tables: MultiGroupBlockTable) -> bool:
    """Whether the mirror equals the host's tables."""
    return bool(np.array_equal(tables.words.cpu().numpy(), tables.arrays.words))


def tensors(step: TableStep) -> dict[str, torch.Tensor]:
    """Every tensor that a step hands out."""
    geometry, csr, local = step.geometry, step.csr(0), step.local_table(1)
    names = ("rows", "query_start_loc", "seq_lens", "zero_start", "token_rows", "positions")
    found = {name: getattr(geometry, name) for name in names}
    found |= {"slots": step.slot_mapping, "states": step.state_slots(2)}
    found |= {f"csr.{name}": value for name, value in vars(csr).items()}
    return found | {f"local.{name}": value for name, value in vars(local).items()}


def values(step: TableStep) -> dict[str, list[object]]:
    """Every value that a step hands out; of CSR's indices those in use."""
    found = {name: tensor.tolist() for name, tensor in tensors(step).items()}
    found["csr.indices"] = found["csr.indices"][: found["csr.indptr"][-1]]
    return found


def fill(tables: MultiGroupBlockTable) -> None:
    """Give both rows blocks in every group, and the ring of row 1 ordinals that wrap."""
    tables.append_row(0, [[11, 12, 13, 14], [15, 16], [17, 18]])
    tables.add_row(1, [[21, 22, 23, 24, 25], [26, 27, 28], [29, 30]], [0, 4, 0])


WORK = [1, 0], [2, 3], [12, 1]


@pytest.mark.parametrize(("capacity", "num_rounds"), [(18, 1), (17, 2), (7, 3)])
def test_more_than_the_staging_holds_takes_counted_rounds(capacity: int, num_rounds: int, device: torch.device) -> None:
    """18 changed words in buffers of fewer take as many rounds as buffers; the step gives what it gives in one."""
    whole, parts = (make(True, device) for _ in range(2))
    cut(parts, capacity)
    for tables in (whole, parts):
        fill(tables)
    expected = values(whole.step(*WORK, num_tokens_padded=8))
    assert values(parts.step(*WORK, num_tokens_padded=8)) == expected
    assert (whole.num_rounds, parts.num_rounds) == (1, num_rounds)
    assert is_committed(whole)
    assert is_committed(parts)
    assert parts.num_words_copied >= whole.num_words_copied
    parts.commit()
    assert parts.num_rounds == 1


def test_a_commit_takes_counted_rounds_too(device: torch.device) -> None:
    """Without a batch, the rows that changed arrive in as many rounds, nulls behind them included."""
    tables = make(True, device)
    fill(tables)
    tables.commit()
    cut(tables, 2)
    tables.add_row(0, [[31], [32], []])
    tables.clear_row(1)
    tables.append_row(1, [[41, 42, 43], [], [44]])
    tables.commit()
    assert tables.num_rounds == 3
    assert is_committed(tables)


def test_a_step_copies_its_batch_and_its_changes(device: torch.device) -> None:
    """The words of a copy are the header, the batch, a record a changed row and group, and the new block ids."""
    tables = make(True, device)
    fill(tables)
    tables.commit()
    empty = HEADER_WORDS + 1 + 3 + 1
    tables.commit()
    assert tables.num_words_copied == empty
    tables.append_row(0, [[19], [], []])
    tables.step(*WORK)
    assert tables.num_words_copied == empty + 2 * (3 + 3) + RECORD_WORDS + 1


@both_paths
def test_outputs_of_a_bucket_stay_where_they_are(use_triton: bool, device: torch.device) -> None:
    """Steps of one padded size write to the same addresses, other sizes and commits between; sizes share buffers."""
    tables = make(use_triton, device)
    fill(tables)
    padded = {"num_reqs_padded": 2, "num_tokens_padded": 8}
    first = tensors(tables.step(*WORK, **padded))
    other = tensors(tables.step([0], [1], [4]))
    tables.append_row(0, [[19], [], []])
    tables.commit()
    again = tensors(tables.step([0], [1], [5], **padded))
    assert {name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in first.items()} == {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in again.items()
    }
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, tensor in other.items():
        assert tensor.data_ptr() == first[name].data_ptr(), name


@both_paths
def test_many_sizes_share_the_buffers(use_triton: bool, device: torch.device) -> None:
    """However many padded sizes were used, a size finds its addresses again and its step is right."""
    tables = make(use_triton, device)
    fill(tables)
    sizes = [{"num_reqs_padded": size_r, "num_tokens_padded": size_t} for size_r in (1, 2) for size_t in (3, 5)]
    steps = [tables.step([0], [1], [4], **size) for size in sizes]
    addresses = [step.slot_mapping.data_ptr() for step in steps]
    expected = []
    for size in sizes:
        fresh = make(use_triton, device)
        fill(fresh)
        expected.append(values(fresh.step([0], [1], [4], **size)))
    for size_t in range(MAX_TOKENS + 1):
        for size_r in (0, 1, 2):
            tables._outputs_of(size_r, size_t)
        tables._outputs_of(0, size_t)
    assert len(tables._outputs) <= 64
    tables.step([1], [2], [12])
    for size, address, right in zip(sizes, addresses, expected, strict=True):
        step = tables.step([0], [1], [4], **size)
        assert step.slot_mapping.data_ptr() == address
        assert values(step) == right


@both_paths
def test_a_commit_leaves_the_last_steps_outputs(use_triton: bool, device: torch.device) -> None:
    """Bringing the tables up to date without a batch changes nothing that the last step handed out."""
    tables = make(use_triton, device)
    fill(tables)
    step = tables.step(*WORK, num_tokens_padded=8)
    before = values(step)
    tables.append_row(0, [[19], [], []])
    tables.commit()
    assert is_committed(tables)
    assert values(step) == before


def fail(*_args: object, **_kwargs: object) -> None:
    """Raise in place of a copy or a launch."""
    raise RuntimeError("the device is gone")


def fail_second(right: Callable[..., None]) -> Callable[..., None]:
    """Let the first call through and raise in the second."""
    calls = iter((right, fail))
    return lambda *args, **kwargs: next(calls)(*args, **kwargs)


def break_numpy(tables: MultiGroupBlockTable, patch: pytest.MonkeyPatch) -> None:
    """Make the host's copy fail where it begins to write."""
    path = tables._path
    mirror = path._mirror.copy()
    mirror.flags.writeable = False
    patch.setattr(path, "_mirror", mirror)
    patch.setattr(path, "_mirror_views", tables.arrays.views(mirror))


BREAKS: dict[str, Callable[[MultiGroupBlockTable, pytest.MonkeyPatch], None]] = {
    "numpy copy": break_numpy,
    "numpy step": lambda tables, patch: patch.setattr(tables._path._step, "run", fail),
    "triton copy": lambda tables, patch: patch.setattr(tables._path, "_copy", fail),
    "triton launch": lambda _tables, patch: patch.setattr("hybridkv_kernels._triton.Launch.run", fail),
    "triton only launch": lambda _tables, patch: patch.setattr("hybridkv_kernels._triton.Launch.run", fail),
    "triton second copy": lambda tables, patch: patch.setattr(tables._path, "_copy", fail_second(tables._path._copy)),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("with_batch", [False, True], ids=["commit", "step"])
def test_a_step_that_fails_loses_nothing(
    name: str, with_batch: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failed step or commit should have copied travels with the next one, with what changed since."""
    use_triton = name.startswith("triton")
    tables = make(use_triton, device)
    fill(tables)
    tables.commit()
    tables.drop_row_head(1, [0, 5, 0])
    tables.append_row(1, [[], [31], []])
    tables.append_row(0, [[32], [], []])
    if use_triton and "only" not in name:
        cut(tables, 1)
    with monkeypatch.context() as patch:
        BREAKS[name](tables, patch)
        with pytest.raises((RuntimeError, ValueError), match=r"the device is gone|read-only"):
            tables.step(*WORK) if with_batch else tables.commit()
    tables.append_row(0, [[33], [], []])
    step = tables.step(*WORK)
    assert is_committed(tables)
    words = tables.arrays.words.tolist()
    for meta, slots in zip(tables.arrays.group_metas, step.slot_mapping.tolist(), strict=True):
        assert slots == [
            meta.slot(words, row, position) for row, position in [(1, 12), (1, 13), (0, 1), (0, 2), (0, 3)]
        ]


@both_paths
def test_tokens_that_only_the_device_knows_of_move_the_batch_on(use_triton: bool, device: torch.device) -> None:
    """Extra tokens of a row lengthen it, move its positions and slots on; the host's figures are bounds."""
    tables = make(use_triton, device)
    fill(tables)
    extra = torch.tensor([2, 1], dtype=torch.int32, device=device)
    step = tables.step([1, 0], [2, 2], [12, 0], num_reqs_padded=2, num_tokens_padded=6, extra=ExtraTokens(extra, 3))
    found, geometry = values(step), step.geometry
    assert found["seq_lens"] == [15, 4]
    assert found["zero_start"] == [False, False]
    assert found["positions"] == [13, 14, 2, 3, 0, 0]
    assert found["token_rows"] == [1, 1, 0, 0, -1, -1]
    assert found["slots"] == [[24 * 4 + 1, 24 * 4 + 2, 46, 47, -1, -1], [57, -1, 32, 33, -1, -1], [-1] * 6]
    assert found["csr.indptr"] == [0, 4, 5]
    assert found["csr.last_page_len"] == [3, 4]
    assert (geometry.max_query_len, geometry.max_seq_len) == (2, 14 + 3)
    assert geometry.seq_lens_cpu.tolist() == [14, 2]
    assert geometry.positions_cpu.tolist() == [12, 13, 0, 1, 0, 0]
    assert geometry.token_rows_cpu.tolist() == [1, 1, 0, 0, -1, -1]
    without = values(tables.step([1, 0], [2, 2], [12, 0], num_reqs_padded=2, num_tokens_padded=6))
    assert without["zero_start"] == [False, True]
    assert without["positions"] == [12, 13, 0, 1, 0, 0]
    nothing = ExtraTokens(torch.zeros_like(extra), 0)
    none_yet = tables.step([1, 0], [2, 2], [12, 0], num_reqs_padded=2, num_tokens_padded=6, extra=nothing)
    assert values(none_yet) == without


@both_paths
def test_paths_agree_on_what_a_step_gives(use_triton: bool, device: torch.device) -> None:
    """Every figure of a small mixed step, worked out by hand: a chunk, a decode beside a ring that wrapped, padding."""
    tables = make(use_triton, device)
    fill(tables)
    found = values(tables.step([1, 0], [1, 3], [12, 0], num_tokens_padded=6))
    assert found["rows"] == [1, 0]
    assert found["query_start_loc"] == [0, 1, 4]
    assert found["seq_lens"] == [13, 3]
    assert found["zero_start"] == [False, True]
    assert found["token_rows"] == [1, 0, 0, 0, -1, -1]
    assert found["positions"] == [12, 0, 1, 2, 0, 0]
    assert found["slots"] == [[24 * 4, 44, 45, 46, -1, -1], [28 * 2, 30, 31, 32, -1, -1], [-1] * 6]
    assert found["states"] == [[29, 17], [30, 18]]
    assert found["csr.indptr"] == [0, 4, 5]
    assert found["csr.indices"] == [21, 22, 23, 24, 11]
    assert found["csr.last_page_len"] == [1, 3]
    assert found["local.block_table"] == [[26, 27, 28], [15, 16, 0]]
    assert found["local.first_positions"] == [8, 0]
    assert found["local.seq_lens"] == [5, 3]


@both_paths
def test_a_step_may_be_launched_apart_from_its_copy(use_triton: bool, device: torch.device) -> None:
    """Staged, then launched, a step gives what it gives at once; another launch of it changes nothing."""
    apart, at_once = (make(use_triton, device) for _ in range(2))
    for tables in (apart, at_once):
        fill(tables)
    staged = apart.stage(*WORK, num_tokens_padded=8)
    apart.launch(staged)
    assert is_committed(apart)
    expected = values(at_once.step(*WORK, num_tokens_padded=8))
    assert values(staged) == expected
    apart.launch(staged)
    assert is_committed(apart)
    assert values(staged) == expected


@both_paths
def test_what_was_staged_and_never_launched_travels_again(use_triton: bool, device: torch.device) -> None:
    """A step interrupted between its copy and its launch loses nothing; one that was launched is not sent twice."""
    tables = make(use_triton, device)
    fill(tables)
    tables.stage(*WORK)
    tables.append_row(0, [[50], [], []])
    tables.commit()
    assert is_committed(tables)
    tables.append_row(0, [[51], [], []])
    tables.launch(tables.stage(*WORK))
    tables.replayed()
    tables.commit()
    assert is_committed(tables)
    if use_triton:
        num_words = tables.num_words_copied
        tables.commit()
        assert tables.num_words_copied == num_words


@both_paths
def test_only_the_last_staged_step_is_launched(use_triton: bool, device: torch.device) -> None:
    """A step staged before another one, or before a commit, is refused; the last one is still launched."""
    tables = make(use_triton, device)
    fill(tables)
    old = tables.stage([1], [1], [12])
    staged = tables.stage(*WORK)
    with pytest.raises(ValueError, match="not the last staged"):
        tables.launch(old)
    tables.launch(staged)
    assert is_committed(tables)
    staged = tables.stage(*WORK)
    tables.commit()
    with pytest.raises(ValueError, match="not the last staged"):
        tables.launch(staged)


def extra_of(num_rows: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """No extra tokens."""
    return torch.zeros(num_rows, dtype=dtype, device=device)


WRONG_EXTRA: list[tuple[str, Callable[[torch.device], torch.Tensor]]] = [
    ("got torch.int64 of shape", lambda device: extra_of(2, device, torch.int64)),
    (r"got torch.int32 of shape \(3,\)", lambda device: extra_of(3, device)),
    (r"got torch.int32 of shape \(2, 1\)", lambda device: extra_of(2, device)[:, None]),
    ("and stride \\(2,\\)", lambda device: extra_of(4, device)[::2]),
    ("on meta", lambda _device: extra_of(2, torch.device("meta"))),
]


@both_paths
@pytest.mark.parametrize(("message", "tensor"), WRONG_EXTRA, ids=[f"{idx}" for idx in range(len(WRONG_EXTRA))])
def test_extra_tokens_of_another_form_are_refused(
    use_triton: bool, message: str, tensor: Callable[[torch.device], torch.Tensor], device: torch.device
) -> None:
    """Another dtype, shape, stride or device raises before anything is copied."""
    tables = make(use_triton, device)
    fill(tables)
    with pytest.raises(ValueError, match=message):
        tables.stage(*WORK, extra=ExtraTokens(tensor(device), 0))
    assert not tables.words.any()
    tables.step(*WORK)
    assert is_committed(tables)


def test_lengths_with_extra_tokens_fit_int32(device: torch.device) -> None:
    """The most extra tokens are not negative, and with them a row's length still fits int32."""
    tables = make(True, device)
    with pytest.raises(ValueError, match=r"got at most -1, expected 0\.\.2147483647"):
        ExtraTokens(extra_of(2, device), -1)
    with pytest.raises(ValueError, match="got a row of 2147483647 tokens and 5 extra ones"):
        tables.stage([0], [1], [2**31 - 2], extra=ExtraTokens(extra_of(2, device), 5))


@pytest.mark.parametrize("rows", [[2], [2, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("computed", [0, 5, 64])
@pytest.mark.parametrize("lengths", [(256, 128), (259, 140)])
def test_long_chunks_have_the_slots_of_their_tokens(
    rows: list[int], computed: int, lengths: tuple[int, int], device: torch.device
) -> None:
    """Prefill chunks of hundreds of tokens, aligned to blocks or not, beside decodes: each token's slot is its own."""
    shapes = [
        TableShape(200, 4),
        TableShape(200, 4),
        TableShape(30, 16),
        TableShape(80, 4, RING),
        TableShape(1, 1, NONE),
    ]
    tables = MultiGroupBlockTable(BlockTable.of_groups(4, shapes), 1024, device)
    tables.append_row(2, [range(1, 101), range(101, 201), range(1, 26), range(1, 81), [3]])
    tables.append_row(0, [range(201, 301), range(301, 321), range(31, 61), range(81, 101), [4]])
    tables.tables[3].drop_row_head(2, 15)
    tables.tables[0].drop_row_head(2, 3)
    scheduled = [{2: lengths[0], 0: lengths[1]}.get(row, 1) for row in rows]
    step = tables.step(rows, scheduled, [computed] * len(rows), num_tokens_padded=512)
    words, geometry = tables.arrays.words.tolist(), step.geometry
    expected_tokens = [(row, computed + i) for row, n in zip(rows, scheduled, strict=True) for i in range(n)]
    tokens = list(zip(geometry.token_rows.tolist(), geometry.positions.tolist(), strict=True))
    assert tokens == expected_tokens + [(-1, 0)] * (512 - len(expected_tokens))
    for meta, slots in zip(tables.arrays.group_metas, step.slot_mapping.tolist(), strict=True):
        assert slots == [meta.slot(words, row, position) for row, position in tokens]
