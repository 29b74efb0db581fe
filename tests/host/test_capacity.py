"""Claims about capacity: what it says fits, the manager runs; one more, it does not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.admission import Verdict
from hybridkv.block_pool import BlockPool
from hybridkv.block_table import make_block_tables
from hybridkv.capacity import Waste, blocks_of, longest_context, max_concurrency, measure_waste, mixed_capacity
from hybridkv.errors import OutOfBlocks, SpecError
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.plan import CachePlan
from hybridkv.planner import describe_cache, plan_cache
from hybridkv.specs import ChunkedAttention, LayerCache, Lifecycle, ModelSpec, SlidingWindow
from tests.models import FULL, chunked_and_full, encoder_decoder, gemma_like, kv_cache, model, state_cache

SPECS = {
    "full": model(kv_cache(FULL)),
    "window": model(kv_cache(SlidingWindow(window=20))),
    "gemma": gemma_like(3, 1, window=20),
    "chunked": chunked_and_full(16),
    "odd_chunk": chunked_and_full(13),
    "state": model(state_cache(), state_cache(), kv_cache(FULL)),
    "cross": encoder_decoder(10),
}
WASTE_TERMS = (
    "needed_bytes",
    "padding_bytes",
    "partly_used_slab_bytes",
    "tail_bytes",
    "in_flight_bytes",
    "null_block_bytes",
    "unused_bytes",
)


def plan_of(spec: ModelSpec, memory_bytes: int, block_size: int = 4, unsettled: int = 0) -> CachePlan:
    """Plan for sequences of up to 200 tokens in steps of up to 8."""
    return plan_cache(spec, memory_bytes, BatchLimits(400, 200, 8, unsettled), block_size=block_size)


def grow(manager: CacheManager, row: int, num_tokens: int, step: int) -> bool:
    """Compute tokens until the row has `num_tokens`; return False at the first step that the pool cannot serve."""
    while (computed := int(manager.num_computed_tokens[row])) < num_tokens:
        amount = min(step, num_tokens - computed)
        if manager.reserve([row], [amount]).verdicts[0] != Verdict.OK:
            return False
        manager.commit([row], [amount])
    return True


def worst_phase(plan: CachePlan, context: int) -> int:
    """Return a length below `context` at which one more token makes a row hold most blocks of every group."""
    manager = CacheManager(plan)
    row = manager.admit(1).admitted_row
    most, at = -1, 0
    for computed in range(context):
        assert manager.reserve([row], [1]).num_ok
        held = sum(int(table.num_blocks_per_row[row] - table.first_block_per_row[row]) for table in manager.tables)
        if held >= most:
            most, at = held, computed
        manager.commit([row], [1])
    return at


@pytest.mark.parametrize("memory_bytes", [12_000, 31_111, 100_000])
@pytest.mark.parametrize("context", [1, 7, 64, 111])
@pytest.mark.parametrize("name", SPECS)
def test_so_many_sequences_run_in_the_worst_phase_but_no_more(name: str, context: int, memory_bytes: int) -> None:
    """The manager takes N sequences to their worst phase and prefills the last one; for N+1 it has no blocks."""
    plan = plan_of(SPECS[name], memory_bytes)
    num_seqs = max_concurrency(plan, context)
    phase = worst_phase(plan, context) if num_seqs else 0
    manager = CacheManager(plan)
    rows = [manager.admit(1).admitted_row for _ in range(num_seqs)]
    for row in rows[:-1]:
        assert grow(manager, row, phase, 8)
        assert manager.reserve([row], [1]).num_ok
    for row in rows[-1:]:
        assert grow(manager, row, context, 8)
    one_more = blocks_of(plan, context, num_seqs + 1)
    with pytest.raises(OutOfBlocks):
        BlockPool(plan).take(one_more)
    if num_seqs:
        BlockPool(plan).take(blocks_of(plan, context, num_seqs))


@pytest.mark.parametrize("name", SPECS)
def test_sequences_in_any_phases_are_never_preempted(name: str) -> None:
    """N sequences that start one after the other and decode side by side get every block they ask for."""
    context = 90
    plan = plan_of(SPECS[name], 60_000)
    num_seqs = max_concurrency(plan, context)
    assert num_seqs > 1
    manager = CacheManager(plan)
    rows: list[int] = []
    for start in range(num_seqs):
        rows.append(manager.admit(1).admitted_row)
        assert grow(manager, rows[-1], 11 + 7 * start % 40, 8)
        for _ in range(3):
            step(manager, rows, context)
    for _ in range(context):
        step(manager, rows, context)
    assert (manager.num_computed_tokens[rows] == context).all()


def step(manager: CacheManager, rows: list[int], context: int) -> None:
    """Let every row that is not done decode a token."""
    running = [row for row in rows if manager.num_computed_tokens[row] < context]
    assert manager.reserve(running, [1] * len(running)).num_ok == len(running)
    manager.commit(running, [1] * len(running))


@pytest.mark.parametrize("name", SPECS)
def test_concurrency_and_context_agree_to_the_block(name: str) -> None:
    """N sequences of c tokens fit exactly if c is at most the longest context of N and N at most the most of c."""
    plan = plan_of(SPECS[name], 40_000)
    fits = [[max_concurrency(plan, context) >= n for context in range(1, 201)] for n in range(1, 60)]
    for n, row in enumerate(fits, start=1):
        assert longest_context(plan, n) == sum(row)


@settings(max_examples=40, deadline=None)
@given(
    lifecycles=st.lists(
        st.one_of(
            st.just(FULL),
            st.builds(SlidingWindow, window=st.integers(1, 40)),
            st.builds(ChunkedAttention, chunk=st.integers(1, 40)),
        ),
        min_size=1,
        max_size=3,
    ),
    memory_bytes=st.integers(20_000, 200_000),
    block_size=st.integers(1, 9),
    context=st.integers(1, 200),
    unsettled=st.integers(0, 3),
)
def test_the_bytes_of_waste_add_up_to_the_memory(
    lifecycles: list[Lifecycle], memory_bytes: int, block_size: int, context: int, unsettled: int
) -> None:
    """No term is negative, their sum is the memory, and the slabs lent are what a real allocation lends."""
    caches: list[LayerCache] = [kv_cache(lifecycle, 1, 8) for lifecycle in lifecycles]
    plan = plan_of(model(*caches, state_cache()), memory_bytes, block_size, unsettled)
    num_seqs = max_concurrency(plan, context)
    waste = measure_waste(plan, context, num_seqs)
    terms = {name: getattr(waste, name) for name in WASTE_TERMS}
    assert min(terms.values()) >= 0
    assert sum(terms.values()) == memory_bytes
    pool = BlockPool(plan)
    pool.take(blocks_of(plan, context, num_seqs))
    assert waste.held_bytes == np.count_nonzero(pool.slab_used) * plan.slab_bytes
    assert 0 <= waste.waste_fraction < 1


def test_a_wastes_terms_are_those_of_a_worked_example() -> None:
    """Two sequences of 10 tokens, full attention of 64 bytes a token, blocks of 4: 3 blocks each, 2 tokens of tail."""
    spec = model(kv_cache(FULL, 1, 8))
    plan = plan_of(spec, 9 * 256 + 100)
    assert (plan.slab_bytes, plan.num_slabs) == (256, 9)
    waste = measure_waste(plan, 10, 2)
    tables = 4 * 400 * (64 + 2)
    assert waste == Waste(10, 2, 2 * 640, 0, 0, 2 * 128, 0, 256, 2 * 256 + 100, tables, tables)
    made = make_block_tables(plan)
    assert waste.table_host_bytes == sum(table.nbytes for table in made) == made[0].arrays.words.nbytes


def test_nothing_fits_where_the_memory_is_too_small() -> None:
    """A described plan without usable slabs holds no sequence of any length, and all memory is unused."""
    plan = describe_cache(gemma_like(), 100, BatchLimits(4, 200, 8), block_size=4)
    assert plan.num_slabs == 0
    assert (max_concurrency(plan, 1), longest_context(plan, 1)) == (0, 0)
    waste = measure_waste(plan, 1, 0)
    assert (waste.unused_bytes, waste.held_bytes, waste.waste_fraction) == (100, 0, 0.0)


@pytest.mark.parametrize("name", SPECS)
def test_a_mixed_load_is_what_the_pool_takes_in_its_order(name: str) -> None:
    """From every start, sequences are lent blocks for their worst phase, one by one, until the pool refuses."""
    lengths = [int(n) for n in np.random.default_rng(7).integers(1, 200, size=40)]
    plan = plan_of(SPECS[name], 30_000)
    counts, tokens = [], []
    for start in range(len(lengths)):
        order = [*lengths[start:], *lengths[:start]]
        admitted = 0
        while takes(plan, (order * 9)[: admitted + 1]):
            admitted += 1
        counts.append(admitted)
        tokens.append(sum((order * 9)[:admitted]))
    mixed = mixed_capacity(plan, lengths)
    assert (mixed.min_concurrency, mixed.max_concurrency) == (min(counts), max(counts))
    assert mixed.mean_concurrency == pytest.approx(np.mean(counts))
    assert mixed.mean_tokens == pytest.approx(np.mean(tokens))


def takes(plan: CachePlan, lengths: list[int]) -> bool:
    """Whether the pool lends what these sequences hold, one of them in its widest chunk, the others decoding."""
    alone = [blocks_of(plan, length, 1) for length in lengths]
    decoding = [blocks_of(plan, length, 2) - own for length, own in zip(lengths, alone, strict=True)]
    widest = np.max([own - held for own, held in zip(alone, decoding, strict=True)], axis=0)
    try:
        BlockPool(plan).take(np.sum(decoding, axis=0) + widest)
    except OutOfBlocks:
        return False
    return True


def test_equal_lengths_mix_as_they_fit_alone() -> None:
    """A load of one length fits as often as `max_concurrency` says, from every start."""
    plan = plan_of(SPECS["gemma"], 60_000)
    most = max_concurrency(plan, 90)
    mixed = mixed_capacity(plan, [90] * (most + 20))
    assert (mixed.min_concurrency, mixed.max_concurrency) == (most, most)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0])
def test_bad_numbers_are_refused(bad: int) -> None:
    """A context, a number of sequences or a length of a load below one raises a `SpecError` that names it."""
    plan = plan_of(SPECS["full"], 12_000)
    with pytest.raises(SpecError, match="context: got"):
        max_concurrency(plan, bad)
    with pytest.raises(SpecError, match="num_seqs: got"):
        longest_context(plan, bad)
    with pytest.raises(SpecError, match="lengths: got"):
        mixed_capacity(plan, [5, bad])
    with pytest.raises(SpecError, match="context: got"):
        measure_waste(plan, bad, 1)
    with pytest.raises(SpecError, match="lengths: got none"):
        mixed_capacity(plan, [])


def test_too_many_sequences_are_refused_with_the_number_that_fits() -> None:
    """Waste of more sequences than fit says how many would."""
    plan = plan_of(SPECS["full"], 12_000)
    most = max_concurrency(plan, 50)
    with pytest.raises(SpecError, match=f"room for {most}"):
        measure_waste(plan, 50, most + 1)


def test_no_longer_context_than_the_tables_are_made_for() -> None:
    """A length beyond `max_model_len` is refused, as the manager would refuse it."""
    plan = plan_of(SPECS["full"], 12_000)
    for ask in (
        lambda: max_concurrency(plan, 201),
        lambda: measure_waste(plan, 201, 0),
        lambda: mixed_capacity(plan, [5, 201]),
    ):
        with pytest.raises(SpecError, match="got 201 tokens, the plan's tables are made for max_model_len=200"):
            ask()


def test_a_short_load_is_repeated() -> None:
    """A load of one sequence fits as often as that sequence does."""
    plan = plan_of(SPECS["gemma"], 60_000)
    assert mixed_capacity(plan, [90]).max_concurrency == max_concurrency(plan, 90)
