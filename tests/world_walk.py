"""Random walks through a stamped world."""

import numpy as np

from tests.world import World
from tests.world_requests import WorldConfig

WEIGHTS = {
    "admit": 6,
    "grow": 10,
    "draft": 3,
    "checkpoint": 1,
    "settle": 3,
    "fork": 1,
    "reorder": 0.7,
    "preempt": 0.7,
    "swap_out": 1,
    "resume": 3,
    "finish": 3.5,
    "move": 1,
    "compact": 0.5,
}


def random_walks(config: WorldConfig, num_walks: int, num_steps: int) -> None:
    """Take that many walks, each with a seed of its own."""
    for seed in range(num_walks):
        random_walk(World(config, seed), num_steps)


def random_walk(world: World, num_steps: int) -> None:
    """Take `num_steps` random actions and check after each.

    Raises: ForeignStampError, AssertionError or a library error at the first corruption.
    """
    verbs, weights = list(WEIGHTS), np.array(list(WEIGHTS.values()))
    for verb in world.rng.choice(verbs, num_steps, p=weights / weights.sum()).tolist():
        world.act(verb)
