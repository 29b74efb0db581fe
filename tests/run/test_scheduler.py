"""The scheduler: budgets, order, preemption, and that nothing waits forever."""

import numpy as np

from hybridkv import BatchLimits, CacheManager
from hybridkv.runner.scheduler import Scheduler
from hybridkv.runner.sequence import SamplingParams, Sequence
from tests.models import gemma_like, plan_slabs


def _scheduler(num_slabs, **sizes):
    limits = BatchLimits(**({"max_num_seqs": 3, "max_model_len": 40, "max_num_batched_tokens": 4} | sizes))
    return Scheduler(CacheManager(plan_slabs(gemma_like(1, 5, window=13), num_slabs, limits)))


def _sequence(request_idx, num_prompt, num_new):
    return Sequence.create(request_idx, np.arange(1, num_prompt + 1), SamplingParams(max_new_tokens=num_new), 40)


def _step(scheduler):
    """Schedule one batch and pretend to compute it; return its (request, tokens) pairs."""
    batch = scheduler.schedule()
    scheduler.manager.commit(batch.rows, batch.num_scheduled_tokens)
    pairs = list(zip(batch.sequences, batch.num_scheduled_tokens, strict=True))
    for sequence, num_new in pairs:
        sequence.num_computed_tokens += num_new
        if sequence.num_remaining_tokens == 0:
            sequence.append(7)
            if sequence.num_tokens == len(sequence.tokens):
                scheduler.finish(sequence)
    scheduler.manager.check()
    return [(sequence.request_idx, num_new) for sequence, num_new in pairs]


def _run(scheduler, max_steps=2_000):
    """Run until nothing is left; return the steps."""
    history = []
    while scheduler.has_work:
        assert len(history) < max_steps, "the scheduler makes no progress"
        history.append(_step(scheduler))
    return history


def test_decodes_come_first_then_chunks_then_admissions():
    """With a budget of 4: a prompt of 6 takes two steps, its decode goes before the next prompt's chunks."""
    scheduler = _scheduler(60)
    for request in (_sequence(0, 6, 3), _sequence(1, 5, 1)):
        scheduler.add(request)
    assert _run(scheduler) == [[(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 3)], [(0, 1)]]


def test_a_row_left_alone_among_scattered_blocks_starts_over():
    """A lone sequence that fits the pool but not the holes that others left is preempted and then finishes."""
    scheduler = _scheduler(9)
    manager = scheduler.manager
    assert manager.plan.longest_sequence() == 32
    scheduler.add(_sequence(0, 31, 1))
    for _ in range(4):
        _step(scheduler)
    others = [manager.admit(4) for _ in range(2)]
    for row in others:
        assert manager.reserve([row], [4]).num_ok == 1
        manager.commit([row], [4])
    _step(scheduler)
    for row in others:
        manager.finish(row)
    _run(scheduler)
    assert manager.num_preemptions == 1
    assert manager.pool.num_held.sum() == 0


def test_random_loads_always_finish():
    """Whatever the lengths, budgets and memory, every sequence that fits alone finishes and the accounting holds."""
    rng = np.random.default_rng(0)
    num_preemptions = 0
    for _ in range(60):
        budget = int(rng.integers(1, 12))
        scheduler = _scheduler(int(rng.integers(9, 24)), max_num_batched_tokens=budget)
        longest = scheduler.manager.plan.longest_sequence()
        for request_idx in range(8):
            num_prompt = int(rng.integers(1, longest))
            scheduler.add(_sequence(request_idx, num_prompt, int(rng.integers(1, longest - num_prompt + 1))))
        history = _run(scheduler)
        assert max(sum(n for _, n in step) for step in history) <= budget
        num_preemptions += scheduler.manager.num_preemptions
    assert num_preemptions > 100
