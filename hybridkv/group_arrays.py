"""What the rows of every group hold for so many tokens, as arrays over groups and rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan import CachePlan, GroupPlan
from hybridkv.retention import first_needed_token, frees_blocks

Int64 = NDArray[np.int64]


class GroupArrays:
    """The groups of a plan, so that one array operation answers for all of them.

    Attributes:
        plans: the groups' plans.
        windowed: groups that free blocks of running sequences.
        states, cross: groups of states, of cross-attention: their rows hold the same blocks whatever the tokens.
    Shapes:
        block_sizes  [num_groups, 1] int64, tokens a block; 1 for states
        fixed        [num_groups, 1] int64, blocks of a row that does not grow, 0 for one that does
    """

    def __init__(self, plan: CachePlan) -> None:
        self.plans: Sequence[GroupPlan] = plan.groups
        self.block_sizes = np.array([[group.block_size] for group in plan.groups], dtype=np.int64)
        self.states = [g for g, group in enumerate(plan.groups) if group.group.is_state]
        self.cross = [g for g, group in enumerate(plan.groups) if group.group.lifecycle.kind == "cross_attention"]
        self.windowed = [g for g, group in enumerate(plan.groups) if frees_blocks(group.group.lifecycle)]
        one = np.ones(1, dtype=np.int64)
        never_grow = {*self.states, *self.cross}
        self.fixed = np.array(
            [[int(group.end_ordinal(one)[0]) if g in never_grow else 0] for g, group in enumerate(plan.groups)],
            dtype=np.int64,
        )
        self._grows = None if never_grow else self.fixed
        # A row with blocks of its own for every token up to here, then none: the last block may be a part of one.
        self.token_groups = [g for g in range(len(plan.groups)) if g not in never_grow]

    def ends(self, num_tokens: Int64) -> Int64:
        """Return `[num_groups, n]`: the ordinal after the last block that `num_tokens` [n] tokens need."""
        ends = num_tokens + (self.block_sizes - 1)
        ends //= self.block_sizes
        if self._grows is None:
            np.copyto(ends, self.fixed, where=self.fixed > 0)
        return ends

    def first_blocks(self, group: int, num_tokens: Int64) -> Int64:
        """Return `[n]`: the first ordinal that the next query after `num_tokens` [n] tokens sees in a group."""
        plan = self.plans[group]
        return first_needed_token(plan.group.lifecycle, num_tokens) // plan.block_size

    def max_blocks(self, num_tokens: int, in_flight: int) -> Int64:
        """Return `[num_groups]`: the most blocks that a sequence ever holds on its way to `num_tokens` tokens."""
        return np.array([group.max_blocks(num_tokens, in_flight) for group in self.plans], dtype=np.int64)
