"""Claims about what a memory holds of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hybridkv
from hybridkv.capacity import longest_context, max_concurrency, measure_waste, mixed_capacity
from hybridkv.errors import SpecError
from hybridkv.layouts import compare_layouts
from hybridkv.lengths import RequestLength
from hybridkv.limits import BatchLimits
from hybridkv.report import (
    CacheTotals,
    PlanOptions,
    cache_totals,
    compare_reports,
    fit_report,
    make_plan,
    plan_report,
    spec_report,
    to_dict,
)
from hybridkv.report.plots import memory_by_group
from hybridkv.report.search import least_memory, longest_fitting
from hybridkv.retention import needed_bytes
from hybridkv.specs import CacheTensor, ChunkedAttention, LayerCache, ModelSpec, SlidingWindow, known_models
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

GEMMA = gemma_like(window=64).model_copy(update={"max_model_len": 4096})
MODELS = {
    "windowed": GEMMA,
    "chunked": chunked_and_full(chunk=32),
    "state": state_and_attention(),
    "states alone": model(state_cache()),
    "cross": encoder_decoder(),
    "mixed": mixed_dtypes(),
}
MIB = 2**20
by_model = pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)


def test_a_spec_is_reported_layer_by_layer() -> None:
    """The dictionary of a spec lists each layer's caches with what applies to them alone, then the totals."""
    compressed = LayerCache(
        lifecycle=FULL, tensors=(CacheTensor(name="k", shape=(1, 3), dtype="int8", tokens_per_entry=2),)
    )
    shared = LayerCache(lifecycle=FULL, shares_kv_with=1)
    document = spec_report(model([state_cache()], compressed, shared, [], max_model_len=64)).to_dict()
    assert '"windowed_bytes_per_token": 0,' in json.dumps(document)
    assert document == {
        "model": "tiny",
        "model_type": "test",
        "max_model_len": 64,
        "layers": [
            {
                "layer": 0,
                "caches": [
                    {
                        "lifecycle": "state",
                        "family": "mamba2",
                        "tensors": [
                            {"name": "conv", "shape": [6, 3], "dtype": "bfloat16"},
                            {"name": "ssm", "shape": [2, 4, 4], "dtype": "float32"},
                        ],
                        "bytes_per_sequence": 164,
                    }
                ],
            },
            {
                "layer": 1,
                "caches": [
                    {
                        "lifecycle": "full_attention",
                        "tensors": [{"name": "k", "shape": [1, 3], "dtype": "int8", "tokens_per_entry": 2}],
                        "bytes_per_token": 1.5,
                    }
                ],
            },
            {
                "layer": 2,
                "caches": [
                    {"lifecycle": "full_attention", "tensors": [], "bytes_per_token": 0, "shares_kv_with": 1},
                ],
            },
            {"layer": 3, "caches": []},
        ],
        "totals": {
            "growing_bytes_per_token": 1.5,
            "windowed_bytes_per_token": 0,
            "state_bytes_per_sequence": 164,
            "cross_bytes_per_sequence": 0,
        },
    }


@pytest.mark.parametrize("name", known_models())
def test_totals_add_up_to_what_a_sequence_needs(name: str) -> None:
    """Below every window, a sequence needs its tokens times both totals per token, beside states and source."""
    spec, num_tokens = ModelSpec.load(name), 64
    totals = cache_totals(spec)
    per_token = totals.growing_bytes_per_token + totals.windowed_bytes_per_token
    fixed = totals.state_bytes_per_sequence + totals.cross_bytes_per_sequence
    assert ceil(num_tokens * per_token) + fixed == needed_bytes(spec, num_tokens)


def test_totals_tell_lifecycles_apart() -> None:
    """Chunks count with windows, apart from full attention; a shared cache counts nowhere."""
    shared = LayerCache(lifecycle=FULL, shares_kv_with=1)
    spec = model(kv_cache(ChunkedAttention(chunk=8), 2), kv_cache(FULL), kv_cache(SlidingWindow(window=4), 3), shared)
    assert cache_totals(spec) == CacheTotals(64, 5 * 64, 0, 0)
    assert cache_totals(encoder_decoder(10)) == CacheTotals(64, 0, 0, 640)


@by_model
def test_a_plan_reports_what_the_planner_says(spec: ModelSpec) -> None:
    """Capacity, waste and layouts are the planner's own numbers for the same plan, memory and block size."""
    report = plan_report(spec, 64 * MIB, PlanOptions(contexts=(1000, 200)))
    plan = make_plan(spec, 64 * MIB, PlanOptions(contexts=(200, 1000)))
    assert report.plan == plan
    assert (report.memory_bytes, report.slab_bytes, report.num_slabs) == (64 * MIB, plan.slab_bytes, plan.num_slabs)
    counts = {context: max_concurrency(plan, context) for context in (200, 1000)}
    assert {entry.context: entry.max_concurrency for entry in report.capacity} == counts
    assert all(entry.num_tokens == entry.context * entry.max_concurrency for entry in report.capacity)
    assert list(report.waste) == [measure_waste(plan, context, count) for context, count in counts.items()]
    block_size = max((group.block_size for group in plan.groups if not group.group.is_state), default=16)
    others = [entry for entry in report.layouts if entry.layout != "hybridkv"]
    in_flight = plan.limits.max_in_flight
    assert others == compare_layouts(spec, 64 * MIB, (200, 1000), block_size=block_size, max_in_flight=in_flight)


@by_model
def test_our_layout_stands_beside_the_others(spec: ModelSpec) -> None:
    """Each context has five layouts, ours last, with the concurrency and waste of the plan."""
    report = plan_report(spec, 64 * MIB, PlanOptions(contexts=(200, 1000)))
    layouts = ["uniform", "one_page_size", "static_partition", "lcm_pages", "hybridkv"]
    assert [(entry.context, entry.layout) for entry in report.layouts] == [(c, n) for c in (200, 1000) for n in layouts]
    for capacity, waste, own in zip(report.capacity, report.waste, report.layouts[4::5], strict=True):
        assert (own.max_concurrency, own.num_tokens) == (capacity.max_concurrency, capacity.num_tokens)
        assert (own.held_bytes, own.needed_bytes) == (waste.held_bytes, waste.needed_bytes)
        assert own.waste_fraction == waste.waste_fraction


def test_the_document_of_a_plan_is_stable() -> None:
    """The dictionary of a plan has these keys in this order, is plain JSON and keeps out what does not apply."""
    document = plan_report(GEMMA, 64 * MIB, trace=[RequestLength(100, 50)]).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document) == [
        "model",
        "memory_bytes",
        "slab_bytes",
        "num_slabs",
        "groups",
        "capacity",
        "waste",
        "layouts",
        "mixed",
    ]
    numbers = ["num_layers", "block_size", "num_parts", "payload_bytes_per_block", "block_stride_bytes"]
    numbers += ["blocks_per_slab", "padding_fraction", "num_blocks", "table_width"]
    windowed, full = document["groups"]
    assert list(windowed) == ["lifecycle", "window", *numbers]
    assert list(full) == ["lifecycle", *numbers]
    assert list(document["capacity"][0]) == ["context", "max_concurrency", "num_tokens"]
    terms = ["needed", "padding", "partly_used_slab", "tail", "in_flight", "null_block", "unused"]
    named = [f"{term}_bytes" for term in [*terms, "table_host", "table_device", "held"]]
    assert list(document["waste"][0]) == ["context", "num_seqs", *named, "waste_fraction"]
    sizes = ["held_bytes", "needed_bytes", "block_size", "note", "waste_fraction"]
    assert list(document["layouts"][0]) == ["layout", "context", "max_concurrency", "num_tokens", *sizes]
    assert "mixed" not in plan_report(GEMMA, 64 * MIB).to_dict()
    spread = ["min_concurrency", "mean_concurrency", "max_concurrency", "mean_tokens"]
    assert list(document["mixed"]) == ["num_requests", "num_too_long", *spread]


@by_model
def test_waste_adds_up_to_the_memory(spec: ModelSpec) -> None:
    """All terms of a context's waste add up to the memory; those of lent slabs to what is held."""
    for waste in plan_report(spec, 64 * MIB).to_dict()["waste"]:
        beside = waste["null_block_bytes"] + waste["unused_bytes"]
        assert waste["held_bytes"] + beside == 64 * MIB
        assert waste["waste_fraction"] == pytest.approx(1 - waste["needed_bytes"] / waste["held_bytes"])


@pytest.mark.parametrize(
    ("own_length", "max_model_len", "contexts"),
    [
        (None, None, (8192, 32768, 131072)),
        (4096, None, (4096, 8192, 32768, 131072)),
        (131072, None, (8192, 32768, 131072)),
        (40960, 32768, (8192, 32768)),
        (40960, 40000, (8192, 32768, 40000)),
        (4096, 16384, (4096, 8192, 16384)),
        (4096, 100, (100,)),
        (None, 100, (100,)),
    ],
)
def test_default_contexts(own_length: int | None, max_model_len: int | None, contexts: tuple[int, ...]) -> None:
    """Without contexts the usual lengths and the longest sequence are reported, none beyond `max_model_len`."""
    spec = GEMMA.model_copy(update={"max_model_len": own_length})
    report = plan_report(spec, MIB, PlanOptions(max_model_len=max_model_len))
    assert tuple(entry.context for entry in report.capacity) == contexts
    assert report.plan.limits.max_model_len == max(*contexts, 0 if max_model_len else own_length or 0)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        (PlanOptions(contexts=(100, 50)), 4096),
        (PlanOptions(contexts=(100, 5000)), 5000),
        (PlanOptions(contexts=(100,), max_model_len=200), 200),
        (PlanOptions(max_model_len=9000), 9000),
    ],
)
def test_tables_reach_the_longest_sequence(options: PlanOptions, longest: int) -> None:
    """Tables are made for the longest of the contexts and of the model's own length or the one given."""
    assert make_plan(GEMMA, MIB, options).limits == BatchLimits(256, longest, 2048)


@by_model
@pytest.mark.parametrize("memory_bytes", [0, 1, 300])
def test_a_plan_without_contexts_refuses_no_memory(spec: ModelSpec, memory_bytes: int) -> None:
    """A memory that holds nothing is reported with zeros, without waste, and our layout says what one would take."""
    report = plan_report(spec, memory_bytes)
    assert {entry.max_concurrency for entry in report.capacity} == {0}
    assert report.waste == ()
    assert all(entry.note for entry in report.layouts if entry.layout == "hybridkv")


@settings(max_examples=20, deadline=None)
@example(GEMMA, 1153, 1, False)
@given(st.sampled_from(list(MODELS.values())), st.integers(1, 3000), st.integers(1, 2**16), st.booleans())
def test_what_would_do_is_exact(spec: ModelSpec, context: int, memory_bytes: int, fixed_blocks: bool) -> None:
    """The least memory holds the context, one byte less does not; the longest context fits, one token more does not."""
    options = PlanOptions(contexts=(context,), block_size=16 if fixed_blocks else None)
    least = least_memory(spec, memory_bytes, options, context)
    assert plan_report(spec, least, options).capacity[0].max_concurrency >= 1
    with pytest.raises(SpecError, match=f"takes at least {least} bytes"):
        plan_report(spec, least - 1, options)
    longest = longest_fitting(spec, memory_bytes, options, context)
    assert longest < context
    if longest:
        assert plan_report(spec, memory_bytes, replace(options, contexts=(longest,))).capacity[0].max_concurrency >= 1
    if longest + 1 < context:
        with pytest.raises(SpecError, match="memory"):
            plan_report(spec, memory_bytes, replace(options, contexts=(longest + 1,)))


def test_the_longest_asked_context_decides() -> None:
    """Contexts given are refused as soon as the longest of them fits nowhere, with what would fit."""
    options = PlanOptions(contexts=(64, 100_000))
    with pytest.raises(SpecError) as error:
        plan_report(GEMMA, MIB, options)
    longest = longest_fitting(GEMMA, MIB, options, 100_000)
    assert "one sequence of 100000 tokens takes at least" in str(error.value)
    assert str(error.value).endswith(f"the longest context that fits is {longest} tokens")
    with pytest.raises(SpecError, match="no shorter one fits either"):
        plan_report(GEMMA, 1000, options)


def test_a_limit_of_sequences_caps_the_capacity() -> None:
    """`max_num_seqs` caps capacity and waste; layouts still show what the memory holds."""
    free, capped = plan_report(GEMMA, 64 * MIB), plan_report(GEMMA, 64 * MIB, PlanOptions(max_num_seqs=3))
    assert free.capacity[0].max_concurrency > 3
    assert {entry.max_concurrency for entry in capped.capacity} == {3}
    assert {entry.num_seqs for entry in capped.waste} == {3}
    assert capped.capacity[0].num_tokens == 3 * capped.capacity[0].context
    assert capped.plan.limits.max_num_seqs == 3
    own = next(entry for entry in capped.layouts if entry.layout == "hybridkv")
    assert own.max_concurrency == max_concurrency(capped.plan, own.context) > 3


@pytest.mark.parametrize("spec", [GEMMA, MODELS["state"], MODELS["states alone"]], ids=["windowed", "state", "states"])
@pytest.mark.parametrize("num_seqs", [None, 1, 7])
@pytest.mark.parametrize("memory_bytes", [10_000, 200_000, 64 * MIB])
def test_the_flags_of_a_fit_reproduce_it(spec: ModelSpec, num_seqs: int | None, memory_bytes: int) -> None:
    """A plan with the flags holds the sequences; with one token more they do not fit, unless that is the limit."""
    asked = PlanOptions(max_num_seqs=num_seqs, max_model_len=5000)
    try:
        report = fit_report(spec, memory_bytes, asked)
    except SpecError as error:
        least = int(str(error).split("use at least ")[1].split()[0])
        assert fit_report(spec, least, asked).max_num_seqs == (num_seqs or 1)
        with pytest.raises(SpecError, match=f"use at least {least} bytes"):
            fit_report(spec, least - 1, asked)
        return
    flags = dict(zip(report.flags[::2], map(int, report.flags[1::2]), strict=True))
    assert flags["--max-model-len"] == report.max_model_len <= 5000
    assert flags["--max-num-seqs"] == report.max_num_seqs
    assert ("--block-size" in flags) == any(not group.group.is_state for group in report.plan.groups)
    given = PlanOptions(
        max_model_len=flags["--max-model-len"],
        max_num_seqs=flags["--max-num-seqs"],
        block_size=flags.get("--block-size"),
    )
    entry = plan_report(spec, memory_bytes, given).capacity[-1]
    assert (entry.context, entry.max_concurrency) == (report.max_model_len, report.max_num_seqs)
    if report.max_model_len < 5000:
        wider = make_plan(spec, memory_bytes, PlanOptions(max_model_len=5000, block_size=given.block_size))
        assert longest_context(wider, num_seqs or 1) == report.max_model_len
    if num_seqs is None:
        assert max_concurrency(report.plan, report.max_model_len) == report.max_num_seqs


def test_a_fit_needs_a_longest_sequence() -> None:
    """A model without a length of its own needs one from the caller."""
    with pytest.raises(SpecError, match="tiny names no longest sequence"):
        fit_report(MODELS["state"], MIB)


def test_a_comparison_is_one_plan_a_model() -> None:
    """Models compared in one memory give the reports they give alone; what does not fit is no reason to refuse."""
    options = PlanOptions(contexts=(100, 200_000))
    reports = compare_reports([GEMMA, MODELS["states alone"]], 10 * MIB, options)
    assert reports[1] == plan_report(MODELS["states alone"], 10 * MIB, options)
    assert [entry.max_concurrency for entry in reports[0].capacity][1] == 0


def test_a_trace_is_measured_on_the_plan() -> None:
    """The mix is that of all requests the plan admits, at input plus output tokens; longer ones are counted apart."""
    trace = [RequestLength(100, 28), RequestLength(5000, 1), RequestLength(1, 1), RequestLength(4096, 0)]
    report = plan_report(GEMMA, MIB, PlanOptions(max_model_len=4096), trace)
    expected = mixed_capacity(report.plan, [128, 2, 4096])
    assert report.mixed is not None
    assert (report.mixed.num_requests, report.mixed.num_too_long) == (3, 1)
    assert report.mixed.mean_concurrency == expected.mean_concurrency
    assert report.mixed.mean_tokens == expected.mean_tokens
    with pytest.raises(SpecError, match="all 1 requests are longer than max_model_len=4096"):
        plan_report(GEMMA, MIB, PlanOptions(max_model_len=4096), [RequestLength(4096, 1)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_model_len": 0}, "max_model_len: got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: got 0"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"contexts": (8, 65), "max_model_len": 64}, "context: got 65, beyond max_model_len=64"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object], message: str) -> None:
    """A number below 1, or a context that the longest sequence excludes, is refused by its name."""
    with pytest.raises(SpecError, match=message):
        PlanOptions(**wrong)


def test_a_picture_shows_the_blocks_of_a_sequence() -> None:
    """The memory by group is blocks times their stride: a window stays flat, full attention grows."""
    plan = make_plan(GEMMA, MIB, PlanOptions(block_size=16))
    windowed, full = memory_by_group(plan, [1, 16, 17, 4096]).tolist()
    assert windowed == [blocks * plan.groups[0].block_stride_bytes for blocks in (1, 1, 2, 5)]
    assert full == [blocks * plan.groups[1].block_stride_bytes for blocks in (1, 1, 2, 256)]


def test_a_report_holds_plain_values() -> None:
    """What JSON has no word for is refused instead of being written as text."""

    @dataclass(frozen=True)
    class Odd:
        value: object

    assert to_dict(Odd((1, [None, Odd(True)]))) == {"value": [1, [None, {"value": True}]]}
    with pytest.raises(TypeError, match="got a set"):
        to_dict(Odd({1}))


def test_the_reports_are_part_of_the_package() -> None:
    """Every exported name is there, the reports included, and an unknown one is an AttributeError."""
    for name in hybridkv.__all__:
        assert getattr(hybridkv, name)
    assert hybridkv.plan_report is plan_report
    with pytest.raises(AttributeError, match="no attribute 'plan_rapport'"):
        _ = hybridkv.plan_rapport
