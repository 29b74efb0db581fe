"""Claims about the states and pages of hybrid models in the engine's memory."""

import pytest
import torch

from hybridkv.attention import LayerParams
from hybridkv.manager import Verdict
from hybridkv.runner.tiny import tiny_model
from hybridkv_kernels.constants import PAD_SLOT_ID
from hybridkv_kernels.state_batch import check_state_batch
from tests.run.live_engines import (
    begin_decode,
    generate,
    make_engine,
    make_prompts,
    null_blocks_are_zero,
    poison_free_blocks,
    start,
    tiny_spec,
)

# A Mamba-2 hybrid, a gated-delta one, a Mamba-1 model, short convolutions, KDA with latents, attention and a state in
# every layer, keys and values that other layers share, an RG-LRU with windows, lightning attention.
KINDS = (
    "bamba",
    "qwen3_5_text",
    "falcon_mamba",
    "lfm2",
    "kimi_linear",
    "falcon_h1",
    "gemma4_text-shared",
    "recurrent_gemma",
    "minimax",
)
STATE_KINDS = tuple(family for family in KINDS if not family.startswith("gemma"))
# Hugging Face's layers cannot expand the latents of no row.
WITHOUT_LATENTS = tuple(family for family in STATE_KINDS if family != "kimi_linear")
SPLIT = ("falcon_h1", "kimi_linear", "minimax", "zamba2", "falcon_mamba")
LENGTHS = (3, 30, 17, 45)


@pytest.mark.parametrize("family", KINDS)
def test_free_memory_is_never_read(family):
    """With NaN in all memory that no sequence holds before every step, the tokens are the same."""
    model, prompts = tiny_model(family), make_prompts(LENGTHS)
    expected = generate(make_engine(family, model), prompts)
    engine = make_engine(family, model, preempt_every=4)
    assert poison_free_blocks(engine) > 2**21
    got = generate(engine, prompts, on_step=lambda _stats: poison_free_blocks(engine))
    assert got == expected
    assert engine.manager.num_preemptions > 0
    assert null_blocks_are_zero(engine)


def checked_batches(engine, step):
    """The rows that advance each state, checked."""
    batches = []
    for layer, cache in engine.model._caches.states.items():
        for name in cache.views:
            state, batch = step.state(layer, name)
            check_state_batch(batch, len(state), len(step.generated))
            batches.append(batch)
    return batches


@pytest.mark.parametrize("family", STATE_KINDS)
def test_every_step_keeps_the_contract_of_the_ops(family, monkeypatch):
    """Prefill chunks, decodes and both together describe their rows as the ops require."""
    engine = make_engine(family, preempt_every=4)
    begin, lengths = engine.model.begin, set()

    def begin_checked(*args):
        step = begin(*args)
        for batch in checked_batches(engine, step):
            lengths.update(batch.query_start_loc.diff().tolist())
        return step

    monkeypatch.setattr(engine.model, "begin", begin_checked)
    generate(engine, make_prompts(LENGTHS), 3)
    assert 1 in lengths
    assert max(lengths) > 8


@pytest.mark.parametrize("family", STATE_KINDS)
def test_padded_rows_touch_nothing(family):
    """Rows and tokens of padding, with every real row in use, change no logit and no byte that a sequence holds."""
    model, prompts = tiny_model(family), make_prompts([*LENGTHS, 2, 2, 2])
    logits, memories = [], []
    for num_padded in (0, 3):
        engine = make_engine(family, model, max_num_seqs=len(prompts))
        start(engine, prompts, num_steps=12)
        del engine.scheduler.running[len(LENGTHS) :]  # they keep their rows and wait
        rows = [sequence.row for sequence in engine.scheduler.running]
        assert (engine.manager.reserve(rows, [1] * len(rows)).verdicts == Verdict.OK).all()
        ids, geometry, step = begin_decode(engine, num_padded)
        for batch in checked_batches(engine, step):
            assert batch.write_slots[len(rows) :].tolist() == [PAD_SLOT_ID] * num_padded
        logits.append(engine.model.forward(ids, geometry, step, range(len(rows))))
        memories.append(engine.arena._bytes.view(torch.float32))
        assert null_blocks_are_zero(engine)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(memories[1], memories[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", WITHOUT_LATENTS)
def test_a_batch_of_padding_alone_leaves_the_memory_alone(family):
    """A batch without a single real row changes no byte."""
    engine = make_engine(family, max_num_seqs=len(LENGTHS))
    start(engine, make_prompts(LENGTHS), num_steps=12)
    before = engine.arena._bytes.clone()
    engine.scheduler.running.clear()
    ids, geometry, step = begin_decode(engine, num_padded=3)
    engine.model.forward(ids, geometry, step, [])
    assert torch.equal(engine.arena._bytes, before)


@pytest.mark.parametrize("family", KINDS)
def test_a_row_and_blocks_that_another_left_are_like_new(family):
    """Sequences that follow each other through one row generate what each generates in an engine of its own."""
    model, prompts = tiny_model(family), make_prompts(LENGTHS)
    engine = make_engine(family, model, max_num_seqs=1, prefix_caching=False)  # else blocks wait to be hit
    assert generate(engine, prompts) == [generate(make_engine(family, model), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("family", KINDS)
def test_a_sequence_may_move_to_another_row(family):
    """Moving a running sequence to a free row after every step changes no token; its old row reads null."""
    model, prompts = tiny_model(family), make_prompts(LENGTHS)
    expected = generate(make_engine(family, model), prompts)
    engine = make_engine(family, model)
    num_moves = 0

    def move_oldest(_stats):
        nonlocal num_moves
        free = [row for row, state in enumerate(engine.manager.row_states) if state == 0]
        if engine.scheduler.running:
            sequence = engine.scheduler.running[0]
            engine.manager.move_row(sequence.row, free[-1])
            sequence.row, num_moves = free[-1], num_moves + 1
        engine.manager.check()
        poison_free_blocks(engine)

    assert generate(engine, prompts, on_step=move_oldest) == expected
    assert num_moves > 10


@pytest.mark.parametrize("family", SPLIT)
def test_every_layer_reads_its_own_part_of_a_split_state(family):
    """Where the plan cuts a state into parts, a layer's rows point to the blocks of its part, each in another block."""
    engine = make_engine(family)
    start(engine, make_prompts(LENGTHS), num_steps=12)
    (group,) = (group for group in engine.plan.groups if group.group.is_state)
    assert group.num_parts > 1
    part_of = {tensor.layer: tensor.part for tensor in group.tensors}
    assert set(part_of.values()) == set(range(group.num_parts))
    _, _, step = begin_decode(engine, num_padded=0)
    rows = [sequence.row for sequence in engine.scheduler.running]
    table = engine.tables.block_table_cpu(group.group.group_id)
    for layer, part in part_of.items():
        _, batch = step.state(layer, "recurrent" if family in ("kimi_linear", "minimax") else "ssm")
        assert batch.read_slots.tolist() == batch.write_slots.tolist() == table[rows, part].tolist()
    used = table[rows, : group.num_parts].ravel().tolist()
    assert len(set(used)) == len(rows) * group.num_parts
    assert min(used) > 0


@pytest.mark.parametrize("family", STATE_KINDS)
def test_a_sequence_holds_the_bytes_that_the_plan_says(family):
    """The blocks that a sequence holds for its states are, to the byte, what the spec says and the views show."""
    engine, spec = make_engine(family), tiny_spec(family)
    start(engine, make_prompts(LENGTHS), num_steps=12)
    (group,) = (group for group in engine.plan.groups if group.group.is_state)
    states = [cache for _, _, cache in spec.owned_caches() if cache.lifecycle.kind == "state"]
    expected = sum(cache.bytes_per_sequence for cache in states)
    held = int(engine.manager.pool.num_held[group.group.group_id])
    assert held == len(LENGTHS) * group.num_parts
    assert held * group.payload_bytes_per_block == len(LENGTHS) * expected
    shown = [view[0].nbytes for cache in engine.model._caches.states.values() for view in cache.views.values()]
    assert sum(shown) == expected


@pytest.mark.parametrize("family", ["gemma4_text-shared", "gemma3n_text-shared"])
def test_a_layer_that_shares_keys_and_values_writes_none(family):
    """A layer that reads another's pages leaves them as they are, whatever keys and values it is handed."""
    engine = make_engine(family)
    start(engine, make_prompts(LENGTHS), num_steps=12)
    rows = [sequence.row for sequence in engine.scheduler.running]
    engine.manager.reserve(rows, [1] * len(rows))
    _, _, step = begin_decode(engine, num_padded=0)
    layers = [layer for layer, cache in engine.model._caches.attention.items() if not cache.owns]
    assert len(layers) == 2
    before = engine.arena._bytes.clone()
    for layer in layers:
        views = engine.model._caches.attention[layer].views
        new = [torch.full((1, view.shape[2], len(rows), view.shape[3]), 7.0) for view in views]
        query = torch.randn(1, 4, len(rows), views[0].shape[3])
        assert step.attend(layer, query, *new, LayerParams(1.0)).isfinite().all()
    assert torch.equal(engine.arena._bytes, before)
