"""The scheduler: budgets, order, preemption, and that nothing waits forever."""

import numpy as np

from hybridkv import BatchLimits, CacheManager
from hybridkv.runner.scheduler import Scheduler
from hybridkv.runner.sequence import Phase, SamplingParams, Sequence
from tests.models import gemma_like, plan_slabs


def _scheduler(num_slabs, **sizes):
    limits = BatchLimits(**({"max_num_seqs": 3, "max_model_len": 40, "max_num_batched_tokens": 4} | sizes))
    return Scheduler(CacheManager(plan_slabs(gemma_like(1, 5, window=13), num_slabs, limits)))


def _sequence(request_idx, num_prompt, num_new):
    """A request whose prompt begins like no other's."""
    prompt = 100 * request_idx + np.arange(num_prompt)
    return Sequence.create(request_idx, prompt, SamplingParams(max_new_tokens=num_new), 40)


def _step(scheduler):
    """Schedule one batch and pretend to compute it; return its (request, tokens) pairs."""
    batch = scheduler.schedule()
    scheduler.manager.take_copies()
    pairs = list(zip(batch.sequences, batch.num_scheduled_tokens, strict=True))
    ids = [s.tokens[s.num_computed_tokens : s.num_computed_tokens + num_new] for s, num_new in pairs]
    scheduler.manager.commit(batch.rows, batch.num_scheduled_tokens, np.concatenate(ids))
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


def test_a_row_left_alone_among_scattered_blocks_goes_on():
    """A lone sequence that fits the pool but not the holes that others left goes on: its blocks move together."""
    scheduler = _scheduler(9)
    manager = scheduler.manager
    assert manager.plan.longest_sequence() == 32
    scheduler.add(_sequence(0, 31, 1))
    for _ in range(4):
        _step(scheduler)
    others = [manager.admit(4).admitted_row for _ in range(2)]
    for row in others:
        assert manager.reserve([row], [4]).num_ok == 1
        manager.commit([row], [4])
    _step(scheduler)
    for row in others:
        manager.finish(row)
    num_moves, take_copies = [], manager.take_copies
    manager.take_copies = lambda: num_moves.append(len((copies := take_copies()).moves)) or copies
    _run(scheduler)
    assert sum(num_moves) > 0
    assert manager.num_preemptions == 0
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
    assert num_preemptions > 50


def test_the_youngest_is_preempted_and_comes_back_first():
    """When blocks run out the latest comer gives way, keeps its place in the queue, and the oldest goes on."""
    scheduler = _scheduler(12, max_num_seqs=2, max_num_batched_tokens=8)
    requests = [_sequence(0, 12, 16), _sequence(1, 12, 10), _sequence(2, 3, 2)]
    for request in requests:
        scheduler.add(request)
    for _ in range(60):
        if scheduler.manager.num_preemptions == 0:
            _step(scheduler)
    assert requests[0].phase is Phase.RUNNING
    assert requests[1].phase is Phase.PREEMPTED
    assert [sequence.request_idx for sequence in scheduler.waiting] == [1, 2]
    _run(scheduler)
    assert all(request.phase is Phase.FINISHED for request in requests)


def test_preempt_every_counts_steps_and_spares_a_lone_prefill():
    """With N=3 the third, sixth, ... step preempts; a lone sequence only after it got a token, so that it moves on."""
    scheduler = _scheduler(60, max_num_batched_tokens=2)
    scheduler = Scheduler(scheduler.manager, preempt_every=3)
    scheduler.add(_sequence(0, 8, 10))
    preemptions = []
    for _ in range(100):
        if not scheduler.has_work:
            break
        _step(scheduler)
        preemptions.append(scheduler.manager.num_preemptions)
    assert not scheduler.has_work
    assert preemptions[:5] == [0, 0, 0, 0, 0]  # four steps of prefill, step 3 among them, then a decode
    assert preemptions[5] == 1
    assert preemptions[-1] >= 2
