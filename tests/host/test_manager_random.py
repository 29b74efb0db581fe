"""Claims that hold after any verbs in any order: every block is counted, and contains what its sequence computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from hybridkv.limits import BatchLimits
from hybridkv.manager import ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.specs import ModelSpec, SlidingWindow
from tests.manager_world import World, recut
from tests.models import (
    FULL,
    chunked_and_full,
    encoder_decoder,
    gemma_like,
    kv_cache,
    model,
    plan_slabs,
    state_and_attention,
    state_cache,
)

LIMITS = BatchLimits(max_num_seqs=8, max_model_len=40, max_num_batched_tokens=8, max_unsettled_tokens=8)
SHAPES: Mapping[str, tuple[ModelSpec, Mapping[int, int]]] = {
    "full": (model(kv_cache(FULL)), {0: 4}),
    "window": (gemma_like(1, 1, window=6), {0: 4, 1: 4}),
    "window of other blocks": (gemma_like(1, 1, window=6), {0: 2, 1: 8}),
    "chunked": (chunked_and_full(8), {0: 4, 1: 4}),
    "state": (state_and_attention(), {1: 4}),
    "window and state": (model(kv_cache(SlidingWindow(window=7)), state_cache(), kv_cache(FULL)), {0: 4, 2: 4}),
    "encoder-decoder": (encoder_decoder(10), {0: 4, 1: 4}),
}
NUM_STEPS = 10_000
_STEPS_A_WORLD = 240


def make_world(shape: str, seed: int) -> World:
    """A world with memory for one to seven of its longest sequences, cut into slabs of 1 to 100 blocks."""
    rng = np.random.default_rng(seed)
    spec, sizes = SHAPES[shape]
    plan = plan_slabs(spec, 400, LIMITS, sizes)
    per_slab = rng.choice([1, 2, 3, 5, 9, 30, 100], size=len(plan.groups)).tolist()
    num_parts = int(rng.integers(1, 4))
    least = recut(plan, 400, per_slab, num_parts).slabs_for(LIMITS.max_model_len)
    plan = recut(plan, least + int(rng.integers(0, 6 * least)), per_slab, num_parts)
    policy = ResumePolicy(
        every=[None, 4, 12][rng.integers(3)],
        volatile_suffix_tokens=int(rng.integers(0, 6)),
        max_per_path=int(rng.integers(1, 5)),
    )
    options = ManagerOptions(
        prefix_caching=bool(rng.random() < 0.9),
        resume_points=policy,
        watermark=float(rng.choice([0, 0, 0.1])),
        host_bytes=int(rng.choice([0, 20])) * plan.slab_bytes,
    )
    return World(plan, options, seed)


def run(shape: str, num_steps: int, first_seed: int) -> None:
    """Run worlds until so many verbs are done; a failure names its world."""
    for seed in range(first_seed, first_seed - (-num_steps // _STEPS_A_WORLD)):
        world = make_world(shape, seed)
        try:
            world.run(_STEPS_A_WORLD)
        except Exception as error:
            error.add_note(f"world: {shape!r}, seed {seed}, after {sum(world.done.values())} verbs and results")
            raise


@pytest.mark.parametrize("shape", SHAPES)
def test_after_any_verbs_everything_agrees_and_every_block_contains_its_tokens(shape: str) -> None:
    """Law 1, 2, 3: counts add up, no writable block is shared, and rows, units and points hold exactly their tokens."""
    run(shape, NUM_STEPS // len(SHAPES), 0)


@pytest.mark.full
@pytest.mark.parametrize("first_seed", range(1000, 11_000, 1000))
@pytest.mark.parametrize("shape", SHAPES)
def test_after_very_many_verbs_too(shape: str, first_seed: int) -> None:
    """The same after 100,000 verbs, split over shapes and worlds."""
    run(shape, NUM_STEPS // len(SHAPES), first_seed)


def test_the_random_engine_does_everything() -> None:
    """The verbs above find what they need: hits, also of tails, copies of every kind, swaps, forks, rollbacks."""
    shapes = ("window", "state", "window and state")
    done = sum((_done(shape, seed) for shape in shapes for seed in range(5)), start=Counter())
    wanted = ("hit", "tail hit", "moves", "within", "to_host", "from_host", "forked", "resumed", "rolled back", "later")
    assert all(done[name] > 0 for name in (*wanted, "PREEMPTED", "SWAPPED")), done


def _done(shape: str, seed: int) -> Counter[str]:
    world = make_world(shape, seed)
    world.run(_STEPS_A_WORLD)
    return world.done
