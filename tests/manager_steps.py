"""Managers for tests, and the steps of engines that drive them."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.admission import Admission, Verdict
from hybridkv.manager import CacheManager
from tests.models import gemma_like, limits, plan_slabs


def gemma_manager(num_slabs: int = 8, window: int = 6) -> CacheManager:
    """Blocks of 4 tokens, 8 tokens a step; group 0 (window) has 1 block a slab, group 1 (full) has 3."""
    plan = plan_slabs(gemma_like(3, 1, window=window), num_slabs, limits(max_num_seqs=3, max_model_len=40))
    assert [group.blocks_per_slab for group in plan.groups] == [1, 3]
    return CacheManager(plan)


def row_ids(manager: CacheManager, row: int) -> list[list[int]]:
    """A row's live block ids in each group."""
    return [table.row_block_ids(row).tolist() for table in manager.tables]


def step(manager: CacheManager, row: int, num_tokens: int) -> None:
    """Reserve and commit tokens of one row."""
    assert manager.reserve([row], [num_tokens]).verdicts.tolist() == [Verdict.OK]
    manager.commit([row], [num_tokens])


def feed(manager: CacheManager, row: int, tokens: Sequence[int], chunk: int = 1 << 30) -> None:
    """Compute a row's tokens behind those it has computed, in steps that its limits allow."""
    most = min(chunk, manager.plan.limits.max_in_flight)
    while (done := int(manager.num_computed_tokens[row])) < len(tokens):
        count = min(most, int(manager.chunk_limits([row])[0]), len(tokens) - done)
        assert manager.reserve([row], [count]).verdicts.tolist() == [Verdict.OK]
        manager.take_copies()
        manager.commit([row], [count], tokens[done : done + count])


def serve(manager: CacheManager, tokens: Sequence[int], num_prompt: int | None = None, **identity: object) -> Admission:
    """Admit a prompt (the first `num_prompt` tokens), compute it and what follows, and end it; return its admission."""
    answer = manager.admit(tokens[:num_prompt], **identity)  # type: ignore[arg-type]
    feed(manager, answer.admitted_row, tokens)
    manager.finish(answer.admitted_row)
    manager.check()
    return answer
