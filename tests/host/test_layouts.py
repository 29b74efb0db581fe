"""Claims about the capacity of other engines' cache layouts."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.layouts import (
    LayoutCapacity,
    LayoutName,
    compare_layouts,
    needed_bytes,
    one_page_layout,
    state_checkpoints_bytes,
    uniform_waste,
)
from hybridkv.retention import max_live_blocks
from hybridkv.specs import (
    CacheTensor,
    ChunkedAttention,
    CrossAttention,
    Dtype,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    State,
    StateFamily,
)
from hybridkv.units import cdiv
from tests.models import (
    FULL,
    chunked_and_full,
    encoder_decoder,
    gemma_like,
    kv_cache,
    mixed_dtypes,
    model,
    state_and_attention,
    state_cache,
)

GIB = 2**30
FOREIGN = get_args(LayoutName)[:4]


def state(family: StateFamily, dtype: Dtype = "bfloat16", **shapes: tuple[int, ...]) -> LayerCache:
    """A state of one dtype."""
    tensors = [CacheTensor(name=name, kind="per_sequence", shape=shape, dtype=dtype) for name, shape in shapes.items()]
    return LayerCache(lifecycle=State(family=family), tensors=tuple(tensors))


def latent(dim: int, tokens_per_entry: int = 1) -> LayerCache:
    """A growing cache of one tensor."""
    tensor = CacheTensor(name="latent", shape=(1, dim), dtype="bfloat16", tokens_per_entry=tokens_per_entry)
    return LayerCache(lifecycle=FULL, tensors=(tensor,))


def bamba() -> ModelSpec:
    """29 Mamba-2 layers with bfloat16 states and 3 attention layers of 8 heads."""
    mamba = state("mamba2", conv=(8448, 3), ssm=(128, 64, 128))
    return model(*[mamba] * 29, *[kv_cache(FULL, 8, 128, "bfloat16")] * 3)


def qwen3_next() -> ModelSpec:
    """36 gated delta net layers with bfloat16 states and 12 attention layers of 2 heads."""
    delta = state("gated_delta_net", conv=(8192, 3), recurrent=(32, 128, 128))
    return model(*([delta] * 3 + [kv_cache(FULL, 2, 256, "bfloat16")]) * 12)


def llama_4() -> ModelSpec:
    """36 layers with chunks of 8,192 tokens and 12 full ones."""
    chunked = kv_cache(ChunkedAttention(chunk=8192), 8, 128, "bfloat16")
    return model(*([chunked] * 3 + [kv_cache(FULL, 8, 128, "bfloat16")]) * 12)


def llama_3_2_vision() -> ModelSpec:
    """32 self attention layers and 8 cross attention layers over four tiles and more: 6,193 image tokens."""
    cross = kv_cache(CrossAttention(max_source_tokens=6193), 8, 128, "bfloat16")
    return model(*[kv_cache(FULL, 8, 128, "bfloat16")] * 32, *[cross] * 8)


def sharing() -> ModelSpec:
    """A window layer that owns its cache, one that reads it, and a full layer."""
    window = SlidingWindow(window=8)
    layers = (
        LayerSpec(layer=0, caches=(kv_cache(window),)),
        LayerSpec(layer=1, caches=(LayerCache(lifecycle=window, shares_kv_with=0),)),
        LayerSpec(layer=2, caches=(kv_cache(FULL),)),
    )
    return ModelSpec(name="sharing", model_type="test", layers=layers)


def everything() -> ModelSpec:
    """All lifecycles, two windows, compressed entries, odd sizes."""
    caches = [FULL, SlidingWindow(window=7), SlidingWindow(window=20), ChunkedAttention(chunk=12)]
    cross = CrossAttention(max_source_tokens=9)
    return model(*map(kv_cache, caches), state_cache(), state_cache(), latent(6, 4), kv_cache(cross, 3), kv_cache(FULL))


SPECS = {
    "windows": gemma_like(5, 2),
    "only_windows": model(kv_cache(SlidingWindow(window=9)), kv_cache(SlidingWindow(window=9))),
    "chunks": chunked_and_full(),
    "states": state_and_attention(),
    "only_states": model(state_cache(), state_cache("float32")),
    "cross": encoder_decoder(),
    "mixed_dtypes": mixed_dtypes(),
    "sharing": sharing(),
    "mla_and_indexer": model(*[[latent(576), latent(128)]] * 3),
    "compressed": model(latent(16, 4), kv_cache(SlidingWindow(window=6))),
    "everything": everything(),
}
specs = st.sampled_from(sorted(SPECS)).map(SPECS.__getitem__)
memories = st.integers(1, 2**19) | st.integers(1, 2**26)
contexts = st.integers(1, 100) | st.integers(1, 100_000)
block_sizes = st.sampled_from([1, 4, 16, 24, 64])


def capacity(name: str, spec: ModelSpec, memory_bytes: int, context: int, block_size: int = 16) -> LayoutCapacity:
    """Return one layout's answer."""
    return compare_layouts(spec, memory_bytes, [context], block_size=block_size)[FOREIGN.index(name)]


def layer_bytes(spec: ModelSpec, tokens: dict[str, int]) -> int:
    """Bytes of all caches with so many tokens in each kind of lifecycle; kinds that are not named count nothing."""
    total = 0
    for _, _, cache in spec.owned_caches():
        kind = cache.lifecycle.kind
        for tensor in cache.tensors if kind in tokens else ():
            entries = 1 if kind == "state" else cdiv(tokens[kind], tensor.tokens_per_entry)
            total += entries * tensor.entry_bytes
    return total


def longest_source(spec: ModelSpec) -> int:
    """Tokens of the longest source, 0 without cross attention."""
    lifecycles = [cache.lifecycle for _, _, cache in spec.owned_caches()]
    return max((life.max_source_tokens for life in lifecycles if isinstance(life, CrossAttention)), default=0)


@pytest.mark.parametrize(
    ("spec", "caches", "bytes_per_block", "block_size"),
    [
        (ModelSpec.load("gemma-3-27b"), [9, 9, 9, 9, 8, 8, 10], 1_310_720, 16),
        (ModelSpec.load("gpt-oss-20b"), [12, 12], 393_216, 16),
        (bamba(), [3] * 9 + [2, 3], 6_488_064, 528),
        (qwen3_next(), [12] * 4, 13_369_344, 544),
        (llama_4(), [12] * 4, 786_432, 16),
    ],
    ids=["gemma-3-27b", "gpt-oss-20b", "bamba-9b", "qwen3-next", "llama-4-scout"],
)
def test_one_page_size_of_released_models(
    spec: ModelSpec, caches: list[int], bytes_per_block: int, block_size: int
) -> None:
    """One page size gives the groups, bytes a block and inflated block sizes published for five released models."""
    layout = one_page_layout(spec)
    assert [group.num_caches for group in layout.groups] == caches
    assert layout.bytes_per_block == bytes_per_block
    assert {group.block_size for group in layout.groups if group.lifecycle.kind != "state"} == {block_size}
    assert capacity("one_page_size", spec, 80 * GIB, 4096).block_size == block_size


def test_one_page_size_blocks_of_a_sequence() -> None:
    """Gemma 3 27B holds 65 blocks in each of six window groups: 646 blocks at 4,096 tokens, 454 at 1,024 or less."""
    groups = one_page_layout(ModelSpec.load("gemma-3-27b")).groups
    assert [group.num_blocks(4096) for group in groups] == [65] * 6 + [256]
    assert [group.num_blocks(1024) for group in groups] == [64] * 7
    block_bytes = 1_310_720
    for memory, fits in ((1293 * block_bytes, 2), (1293 * block_bytes - 1, 1), (647 * block_bytes - 1, 0)):
        assert capacity("one_page_size", ModelSpec.load("gemma-3-27b"), memory, 4096).max_concurrency == fits


def test_buckets_of_like_size_share_the_larger_size() -> None:
    """13 full and 12 window layers make two groups as wide as 13; 20 and 30 make three as wide as 20."""
    assert [group.num_caches for group in one_page_layout(gemma_like(12, 13)).groups] == [12, 13]
    assert [group.num_caches for group in one_page_layout(gemma_like(30, 20)).groups] == [15, 15, 20]
    assert one_page_layout(gemma_like(12, 13)).bytes_per_block == 13 * 16 * 64
    assert one_page_layout(gemma_like(30, 20)).bytes_per_block == 20 * 16 * 64


def test_smaller_pages_take_more_tokens_or_are_padded() -> None:
    """A page of half the bytes takes twice the tokens; one of two fifths is padded to the largest page."""
    for wide, heads, block_size in ((6, 3, 32), (5, 2, 16)):
        spec = model(kv_cache(FULL, heads), kv_cache(SlidingWindow(window=64), wide))
        full, windowed = one_page_layout(spec).groups
        assert (full.block_size, windowed.block_size) == (block_size, 16)
        assert capacity("one_page_size", spec, GIB, 64).block_size == block_size


def test_one_lifecycle_is_never_padded() -> None:
    """Latents and indexer keys share one group whose block is the sum of their pages."""
    layout = one_page_layout(SPECS["mla_and_indexer"])
    (group,) = layout.groups
    assert (group.num_caches, group.block_size) == (6, 16)
    assert layout.bytes_per_block == 3 * 16 * (576 + 128) * 2
    (states,) = one_page_layout(SPECS["only_states"]).groups
    assert (states.num_caches, states.block_size, states.num_blocks(10**6)) == (2, 1, 1)


def test_states_inflate_attention_blocks() -> None:
    """Beside a state, a block is a multiple of 16, of what was asked for and of an entry; the widest page decides."""
    assert [one_page_layout(bamba(), asked).groups[-1].block_size for asked in (1, 16, 32)] == [528, 528, 544]
    big = state("mamba1", ssm=(1000, 10))
    (states, full) = one_page_layout(model(big, latent(100, 24))).groups
    assert (states.block_size, full.block_size) == (1, 48 * cdiv(20_000, 2 * 200))
    assert one_page_layout(model(big, kv_cache(FULL, 100, 100))).groups[1].block_size == 16
    _, full, windowed = one_page_layout(model(big, kv_cache(FULL), kv_cache(SlidingWindow(window=64), 4))).groups
    assert (full.block_size, windowed.block_size) == (4 * 80, 80)


def test_uniform_waste_of_released_models() -> None:
    """Every token in every layer wastes 79.59 % of Llama 3.2 Vision, 25 % of Gemma 2 and 56.25 % of Ministral."""
    assert uniform_waste(llama_3_2_vision(), 43, 6193) == pytest.approx(0.7959, abs=5e-5)
    assert uniform_waste(ModelSpec.load("gemma-2-9b"), 8192) == 0.25
    assert uniform_waste(ModelSpec.load("Ministral-8B-Instruct-2410"), 131_072) == 0.5625


def test_uniform_waste_knows_states_and_shorter_sources() -> None:
    """States are held and needed alike; a text without an image wastes only the cross attention layers."""
    assert uniform_waste(SPECS["only_states"], 10_000) == 0
    assert uniform_waste(bamba(), 10_000) == 0
    assert uniform_waste(llama_3_2_vision(), 43) == pytest.approx(8 / 40)


def test_a_state_every_16_tokens() -> None:
    """The 7B hybrid keeps 625 state sets of a sequence of 10,000 tokens: 17.398 GB with four attention layers."""
    mamba = state("mamba1", "float16", ssm=(4096, 128), conv=(8448, 4))
    spec = model(*[mamba] * 24, *[kv_cache(FULL, 32, 128, "float16")] * 4)
    assert state_checkpoints_bytes(spec, 10_000, 16) == 17_397_760_000
    assert state_checkpoints_bytes(spec, 10_001, 16) == 17_397_760_000 + 24 * (4096 * 128 + 8448 * 4) * 2 + 4 * 16_384


@given(spec=specs, num_tokens=contexts)
def test_one_state_a_sequence_is_what_must_be_kept(spec: ModelSpec, num_tokens: int) -> None:
    """A checkpoint interval of the whole sequence or more keeps `needed_bytes`, one of half keeps one set more."""
    needed = needed_bytes(spec, num_tokens)
    assert state_checkpoints_bytes(spec, num_tokens, num_tokens) == needed
    assert state_checkpoints_bytes(spec, num_tokens, num_tokens + 1) == needed
    states = layer_bytes(spec, {"state": 0})
    assert state_checkpoints_bytes(spec, 2 * num_tokens, num_tokens) == needed_bytes(spec, 2 * num_tokens) + states


def test_four_layouts_for_each_context() -> None:
    """The answers come context by context, the layouts in their declared order."""
    answers = compare_layouts(gemma_like(), GIB, [64, 16])
    assert [(a.context, a.layout) for a in answers] == [(c, name) for c in (64, 16) for name in FOREIGN]
    assert compare_layouts(gemma_like(), GIB, []) == []


def test_static_partition_of_windows() -> None:
    """With a full page of 2 and a windowed page of 5 units, 600 units make 100 full and 80 windowed pages."""
    unit = 4 * 64
    spec = gemma_like(5, 2, window=9)
    # A sequence of 8 tokens holds two pages of each pool: windows run out first. One of 20 holds five and three.
    short, longer = (capacity("static_partition", spec, 600 * unit, context, 4) for context in (8, 20))
    assert (short.max_concurrency, short.held_bytes) == (40, 600 * unit)
    assert (longer.max_concurrency, longer.held_bytes) == (20, 600 * unit)
    longest = capacity("static_partition", spec, 600 * unit, 140, 4)
    assert (longest.max_concurrency, longest.held_bytes) == (2, 420 * unit)
    assert longest.waste_fraction == 1 - 2 * (2 * 140 + 5 * 9) / (420 * 4)


def test_windows_of_unlike_length_share_a_pool() -> None:
    """A sequence holds the pages of its widest window in all windowed layers: four of 4 tokens for a window of 12."""
    spec = model(*[kv_cache(SlidingWindow(window=window)) for window in (4, 12)])
    answer = capacity("static_partition", spec, 8 * 2 * 4 * 64, 100, 4)
    assert (answer.max_concurrency, answer.held_bytes) == (2, 8 * 2 * 4 * 64)


def test_static_partition_of_states() -> None:
    """Beside attention, states have 9/19 of the memory; models of one kind use all of it."""
    spec = state_and_attention()
    sequence_states = 2 * (6 * 3 * 2 + 32 * 4)
    memory = 19 * sequence_states
    assert capacity("static_partition", spec, memory, 1).max_concurrency == 3  # 3,280 B for pages of 1,024 B
    assert capacity("static_partition", spec, memory, 1, 1).max_concurrency == 9
    for alone in ("only_states", "only_windows"):
        full = capacity("static_partition", SPECS[alone], memory, 1)
        assert full.max_concurrency == memory // layer_bytes(SPECS[alone], {"state": 0, "sliding_window": 16})


def test_static_partition_locks_every_pool() -> None:
    """The held bytes are the fullest pool's share of the whole memory, so idle pools count as waste."""
    memory = 100 * 2**20
    answer = capacity("static_partition", bamba(), 10 * GIB, 262_144)
    kv_pages = 10 * GIB * 10 // 19 // (16 * 3 * 4096)
    assert answer.max_concurrency == kv_pages // 16_384
    assert answer.held_bytes == cdiv(10 * GIB * answer.max_concurrency * 16_384, kv_pages)
    assert capacity("static_partition", bamba(), memory, 64).note == "the state pool is too small for one sequence"


def test_sequences_share_large_pages() -> None:
    """Two sequences of one small block share a large page, which one sequence alone holds too."""
    spec = gemma_like(3, 1, window=4)  # blocks of 3 and 1 units, a page of 3
    page = 3 * 4 * 64
    for num_pages, fits in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (6, 4)):
        answer = capacity("lcm_pages", spec, num_pages * page, 4, 4)
        assert answer.max_concurrency == fits
        assert answer.held_bytes == (fits + cdiv(fits, 3)) * page


def test_a_page_larger_than_the_memory() -> None:
    """Where blocks have few common divisors, nothing fits and the note says how large a page would be."""
    page = lcm(3 * 16 * 4096, 29 * 2_147_840)
    answer = capacity("lcm_pages", bamba(), page - 1, 4096)
    assert (answer.max_concurrency, answer.num_tokens, answer.held_bytes, answer.waste_fraction) == (0, 0, 0, 0.0)
    assert answer.note == "a page of 22.28 GiB passes the memory"
    assert capacity("lcm_pages", bamba(), page, 4096).note == "one sequence takes 44.55 GiB"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_fits_into_one_byte(spec: ModelSpec) -> None:
    """Every layout of every kind of model answers 0 with a reason where the memory is too small."""
    for answer in compare_layouts(spec, 1, [1, 10**7]):
        assert (answer.max_concurrency, answer.held_bytes, answer.needed_bytes) == (0, 0, 0)
        assert answer.note
        assert "\n" not in answer.note


def fits(name: str, spec: ModelSpec, memory: int, context: int, block: int, n: int) -> bool:
    """Whether `n` sequences fit, straight from the layouts' definitions."""
    with_source = cdiv(context + longest_source(spec), block)
    states = layer_bytes(spec, {"state": 0})
    full_page = layer_bytes(spec, dict.fromkeys(("full_attention", "cross_attention"), block))
    window_page = layer_bytes(spec, dict.fromkeys(("sliding_window", "chunked_attention"), block))
    if name == "uniform":
        return n * (states + with_source * (full_page + window_page)) <= memory
    if name == "one_page_size":
        layout = one_page_layout(spec, block)
        blocks = sum(max_live_blocks(group.lifecycle, group.block_size, context, 1) for group in layout.groups)
        return (1 + n * blocks) * layout.bytes_per_block <= memory or n == 0
    lifecycles = {cache.lifecycle for _, _, cache in spec.owned_caches()}
    if name == "lcm_pages":
        sizes = {
            life: sum(
                tensor.entry_bytes * (1 if life.kind == "state" else cdiv(block, tensor.tokens_per_entry))
                for _, _, cache in spec.owned_caches()
                if cache.lifecycle == life
                for tensor in cache.tensors
            )
            for life in lifecycles
        }
        page = lcm(*sizes.values())
        pages = sum(cdiv(n * max_live_blocks(life, block, context, 1), page // size) for life, size in sizes.items())
        return pages * page <= memory
    windowed = [life for life in lifecycles if life.kind in ("sliding_window", "chunked_attention")]
    kv_share = Fraction(10, 19) if states and full_page + window_page else Fraction(not states)
    kv = int(memory * kv_share)
    if n * states > memory - kv:
        return False
    full_pages = int(kv / (full_page + Fraction(8, 10) * window_page)) if full_page else 0
    window_pages = int(Fraction(8, 10) * full_pages) if full_page else kv // window_page if window_page else 0
    touched = max((max_live_blocks(life, block, context, 1) for life in windowed), default=0)
    return n * touched <= window_pages and (not full_page or n * with_source <= full_pages)


@settings(max_examples=300, deadline=None)
@given(spec=specs, memory=memories, context=contexts, block_size=block_sizes)
def test_one_sequence_more_does_not_fit(spec: ModelSpec, memory: int, context: int, block_size: int) -> None:
    """The concurrency is the largest that the layout's definition allows."""
    for answer in compare_layouts(spec, memory, [context], block_size=block_size):
        n = answer.max_concurrency
        assert fits(answer.layout, spec, memory, context, block_size, n), answer
        assert not fits(answer.layout, spec, memory, context, block_size, n + 1), answer


@settings(max_examples=300, deadline=None)
@given(spec=specs, memory=memories, context=contexts, block_size=block_sizes)
def test_sequences_occupy_no_less_than_they_need_and_no_more_than_there_is(
    spec: ModelSpec, memory: int, context: int, block_size: int
) -> None:
    """Needed <= held <= memory, so waste is in [0, 1); a note stands where nothing fits, and only there."""
    for answer in compare_layouts(spec, memory, [context], block_size=block_size):
        assert answer.needed_bytes == answer.max_concurrency * needed_bytes(spec, context)
        assert answer.num_tokens == answer.max_concurrency * context
        assert answer.needed_bytes <= answer.held_bytes <= memory
        assert 0 <= answer.waste_fraction < 1
        assert bool(answer.note) == (answer.max_concurrency == 0)


@settings(max_examples=200, deadline=None)
@given(spec=specs, sizes=st.lists(memories, min_size=2, max_size=4), context=contexts, block_size=block_sizes)
def test_more_memory_holds_no_fewer(spec: ModelSpec, sizes: list[int], context: int, block_size: int) -> None:
    """The concurrency never falls when the memory grows."""
    for name in FOREIGN:
        counts = [capacity(name, spec, memory, context, block_size).max_concurrency for memory in sorted(sizes)]
        assert counts == sorted(counts)


@settings(max_examples=200, deadline=None)
@given(spec=specs, memory=memories, lengths=st.lists(contexts, min_size=2, max_size=4), block_size=block_sizes)
def test_longer_contexts_hold_no_more(spec: ModelSpec, memory: int, lengths: list[int], block_size: int) -> None:
    """The concurrency never rises when the sequences grow."""
    answers = compare_layouts(spec, memory, sorted(lengths), block_size=block_size)
    for name in FOREIGN:
        counts = [answer.max_concurrency for answer in answers if answer.layout == name]
        assert all(shorter >= longer for shorter, longer in pairwise(counts))


def test_wrong_arguments_are_named() -> None:
    """Sizes below 1 and sources that no encoder gives are refused with their name, value and bound."""
    spec = encoder_decoder(10)
    with pytest.raises(SpecError, match="memory_bytes: got 0, expected an integer of at least 1"):
        compare_layouts(spec, 0, [1])
    with pytest.raises(SpecError, match="context: got 0, expected an integer of at least 1"):
        compare_layouts(spec, 1, [5, 0])
    with pytest.raises(SpecError, match="block_size: got 0, expected an integer of at least 1"):
        compare_layouts(spec, 1, [1], block_size=0)
    with pytest.raises(SpecError, match="block_size: got -1, expected an integer of at least 1"):
        one_page_layout(spec, -1)
    with pytest.raises(SpecError, match="every_tokens: got 0"):
        state_checkpoints_bytes(spec, 1, 0)
    with pytest.raises(SpecError, match="num_tokens: got 0"):
        uniform_waste(spec, 0)
    with pytest.raises(SpecError, match=r"num_source_tokens: got 11, expected 0 to 10, the longest source of tiny"):
        uniform_waste(spec, 5, 11)
    with pytest.raises(SpecError, match="num_source_tokens: got 1, expected 0 to 0"):
        uniform_waste(gemma_like(), 5, 1)


def test_one_sequence_being_prefilled_takes_its_chunk_in_every_layout() -> None:
    """Layouts that free windows hold a chunk more, once: a chunk of 1,024 at 16 a block is 64 blocks in each group."""
    spec = ModelSpec.load("gpt-oss-20b")  # 12 layers with a window of 128, 12 full, 24 KiB a token each
    group_block = 16 * 24 * 1024
    memory = 10_000 * group_block
    decoding = {c.layout: c for c in compare_layouts(spec, memory, [4096])}
    prefilling = {c.layout: c for c in compare_layouts(spec, memory, [4096], max_in_flight=1025)}
    for layout, once in (("uniform", 0), ("one_page_size", 64), ("lcm_pages", 64)):
        before, after = decoding[layout], prefilling[layout]
        per_sequence = before.held_bytes // before.max_concurrency
        assert after.held_bytes == after.max_concurrency * per_sequence + once * group_block
        assert before.max_concurrency - after.max_concurrency in (0, 1)
    assert prefilling["static_partition"].held_bytes == decoding["static_partition"].held_bytes
    assert prefilling["static_partition"].max_concurrency == decoding["static_partition"].max_concurrency
    # A sequence takes 256 blocks in full and 9 in the window, its chunk 64 more, block 0 one more where it is reserved.
    for layout, least in (("one_page_size", 256 + 9 + 64 + 1), ("lcm_pages", 256 + 9 + 64)):
        for num_blocks, fits in ((least - 1, 0), (least, 1)):
            found = compare_layouts(spec, num_blocks * group_block, [4096], max_in_flight=1025)
            assert [c.max_concurrency for c in found if c.layout == layout] == [fits]
    with pytest.raises(SpecError, match="max_in_flight: got 0"):
        compare_layouts(spec, memory, [4096], max_in_flight=0)
