"""Preempted sequences that wait on the host come back as they were."""

import pytest
import torch

from hybridkv.arena import Arena, HostArena
from hybridkv.copy_list import BlockCopies
from hybridkv.row_lengths import RowState
from hybridkv.runner import SamplingParams
from hybridkv.runner.tiny import FAMILIES
from tests.run.live_engines import (
    SAMPLE_FAMILIES,
    assert_hugging_face_generates,
    generate,
    generate_recorded,
    make_engine,
    make_prompts,
    null_blocks_are_zero,
    poison_free_blocks,
    steady_model,
)

REST = [family for family in FAMILIES if family not in SAMPLE_FAMILIES]
EACH_FAMILY = [*SAMPLE_FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in REST)]
LENGTHS = (30, 17, 45)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_swapped_sequence_computes_nothing_again(family):
    """Without a prefix cache, sequences that go to the host and back compute each token once, and all are right."""
    model, prompts = steady_model(family), make_prompts(LENGTHS)
    engine = make_engine(family, model, preempt_every=3, prefix_caching=False, host_memory_bytes=2**21)
    params = SamplingParams(max_new_tokens=10)
    completions, logits = generate_recorded(engine, prompts, params, lambda _stats: poison_free_blocks(engine))
    assert engine.stats.num_preemptions > 3
    assert engine.stats.num_computed_tokens == sum(LENGTHS) + 9 * len(LENGTHS)
    assert_hugging_face_generates(model, prompts, [c.token_ids for c in completions], logits)
    assert null_blocks_are_zero(engine)
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0


def _recorded_preemptions(engine):
    """Return a list that will have the state of every row that is preempted from now on."""
    states, preempt = [], engine.manager.preempt

    def recorded(*args, **kwargs):
        states.append(preempt(*args, **kwargs))

    engine.manager.preempt = recorded
    return states


@pytest.mark.parametrize("layout", ["slab", "contiguous"])
@pytest.mark.parametrize(("family", "memory"), [("gemma3_text", 140_000), ("bamba", 280_000)])
def test_memory_that_runs_out_swaps_and_changes_nothing(family, memory, layout):
    """With too little memory for all sequences some go to the host, beside a prefix cache, in either layout."""
    model, prompts = steady_model(family), make_prompts((30, 17, 45, 60, 3, 25))
    engine = make_engine(family, model, memory_bytes=memory, layout=layout, host_memory_bytes=2**20)
    states = _recorded_preemptions(engine)
    outputs = generate(engine, prompts, 40)
    assert RowState.SWAPPED in states
    assert_hugging_face_generates(model, prompts, outputs)
    engine.manager.check()


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
def test_a_full_host_means_computing_again(family):
    """Where the host has room for one sequence only, the others are computed again, and all are right."""
    model, prompts = steady_model(family), make_prompts(LENGTHS)
    plan = make_engine(family, model).plan
    host_bytes = (1 + plan.slabs_for(30)) * plan.slab_bytes
    engine = make_engine(family, model, prefix_caching=False, host_memory_bytes=host_bytes)
    states = _recorded_preemptions(engine)

    def preempt_all(stats):
        if stats.num_steps in (8, 12):
            engine.scheduler.preempt_all()

    outputs = generate(engine, prompts, on_step=preempt_all)
    assert {*states} == {RowState.SWAPPED, RowState.PREEMPTED}
    assert_hugging_face_generates(model, prompts, outputs)
    engine.manager.check()


def test_copies_that_failed_run_before_the_next_pass(monkeypatch):
    """A resume point whose copy failed has its content before anybody goes on from it."""
    model, prompts = steady_model("bamba"), make_prompts(LENGTHS[:1])
    engine = make_engine("bamba", model)
    run_copies, failed = engine.arena.run_copies, []

    def fail_once(copies, host=None):
        if len(copies.within) and not failed:
            failed.append(len(copies.within))
            raise RuntimeError("the copy failed")
        run_copies(copies, host)

    monkeypatch.setattr(engine.arena, "run_copies", fail_once)
    with pytest.raises(RuntimeError, match="the copy failed"):
        generate(engine, prompts)
    outputs = generate(engine, prompts)
    assert failed
    assert engine.stats.num_hit_tokens
    assert_hugging_face_generates(model, prompts, outputs)


@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_an_arena_runs_copies_in_the_order_they_ask_for(layout):
    """A block moves, one comes from the host over it, is copied, and the copy goes to the host: all see the last."""
    plan = make_engine("gemma3_text").plan
    arena = Arena(plan, layout=layout)
    host = HostArena(arena, 4 * plan.slab_bytes)
    for group in plan.groups:
        g, first = group.group.group_id, group.blocks_per_slab
        views = [arena.view(t.layer, t.name, t.cache_idx) for t in group.tensors]
        of_host = [host.view(t.layer, t.name, t.cache_idx) for t in group.tensors]
        for view, other in zip(views, of_host, strict=True):
            view[first] = 1.0
            other[first] = 2.0
        entry = torch.tensor
        arena.run_copies(
            BlockCopies(
                moves=entry([[g, first, first + 1]]).numpy(),
                from_host=entry([[g, first, first]]).numpy(),
                within=entry([[g, first, first + 2]]).numpy(),
                to_host=entry([[g, first + 2, first + 1]]).numpy(),
            ),
            host,
        )
        for view, other in zip(views, of_host, strict=True):
            assert [float(view[first + i].unique()) for i in range(3)] == [2.0, 1.0, 2.0]
            assert float(other[first + 1].unique()) == 2.0
    assert all(not arena.view(t.layer, t.name)[0].any() for group in plan.groups for t in group.tensors)


def test_copies_to_a_host_that_is_not_there_are_refused():
    """Without memory on the host such copies raise before any block is written."""
    arena = Arena(make_engine("llama").plan)
    with pytest.raises(ValueError, match="host"):
        arena.run_copies(BlockCopies(to_host=torch.tensor([[0, 5, 5]]).numpy()))


def test_blocks_on_the_host_have_the_strides_of_the_device():
    """Whole blocks travel, and the host takes no more memory than it was given."""
    engine = make_engine("bamba", host_memory_bytes=2**20)
    for ours, theirs in zip(engine.plan.groups, engine.host.plan.groups, strict=True):
        assert ours.block_stride_bytes == theirs.block_stride_bytes
    assert engine.host.plan.arena_bytes <= 2**20
