"""The manager of this library as the benchmark drives it."""

from collections.abc import Sequence

import numpy as np
from manager_workloads import BLOCK_SIZE, CACHE_TOKENS, MAX_ROW_TOKENS, NUM_ROWS, Shape, StepTokens, Tokens
from numpy.typing import NDArray

from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.plan import CachePlan, SlotMappingMode
from hybridkv.planner import describe_cache, plan_cache
from hybridkv.prefix_index import PrefixIndex
from hybridkv.specs import ModelSpec

_MAX_CHUNK_TOKENS = 8192
_FILLER_TOKENS = 8192


def make_plan(shape: Shape, num_rows: int) -> CachePlan:
    """Plan memory for `num_rows` rows at their longest, for the cache beside them."""
    spec = ModelSpec.load(shape.model)
    limits = BatchLimits(
        max_num_seqs=NUM_ROWS + 1, max_model_len=4 * MAX_ROW_TOKENS, max_num_batched_tokens=_MAX_CHUNK_TOKENS
    )
    draft = describe_cache(spec, 2**45, limits, block_size=BLOCK_SIZE)
    num_slabs = num_rows * draft.slabs_for(MAX_ROW_TOKENS) + draft.slabs_for(CACHE_TOKENS // 4) * 4 + 1
    return plan_cache(spec, num_slabs * draft.slab_bytes, limits, block_size=BLOCK_SIZE)


class Ours:
    """A decode step is `reserve` then `commit` for all rows at once, in int32 arrays."""

    name = "ours"
    block_size = BLOCK_SIZE

    def __init__(self, shape: Shape, num_rows: int) -> None:
        plan = make_plan(shape, num_rows)
        self.manager = CacheManager(plan)
        modes = [group.mode for group in plan.groups]
        self._full = modes.index(SlotMappingMode.FULL)
        self._window = modes.index(SlotMappingMode.SLIDING_WINDOW) if shape.window is not None else None
        self._rows = np.zeros(0, dtype=np.int32)
        self._ones = np.zeros(0, dtype=np.int32)

    def fill_rows(self, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Admit prompts, compute them in chunks."""
        self._rows = np.array([self._compute(prompt) for prompt in prompts], dtype=np.int32)
        self._ones = np.ones(len(prompts), dtype=np.int32)

    def fill_cache(self) -> None:
        """Compute and finish prompts until the next one has to evict."""
        tokens = Tokens(seed=1)
        while not self._index.trunk.num_evicted:
            self.finish(self._compute(tokens.draw(_FILLER_TOKENS)))

    def decode_step(self, tokens: StepTokens) -> None:
        """Reserve a token of each row, commit it."""
        self._reserve(self._rows, self._ones)
        self.manager.take_copies()
        self.manager.commit(self._rows, self._ones, tokens.ids)

    def settle(self, tokens: StepTokens) -> None:
        """Do nothing: the step has done it all."""

    def prepare(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids: arrays are our currency."""
        return ids

    def admit(self, prompt: NDArray[np.int32]) -> tuple[int, int]:
        """Find the prompt, give it a row, reserve and commit what is not in the cache; return row and hit."""
        admission = self.manager.admit(prompt)
        row, num_hit = admission.admitted_row, admission.num_hit_tokens
        self._compute_rest(row, prompt, num_hit)
        return row, num_hit

    def finish(self, row: int) -> None:
        """Free a row; its blocks stay cached."""
        self.manager.finish(row)

    def hash_prompt(self, prompt: NDArray[np.int32]) -> None:
        """Do nothing: `search` hashes."""

    def search(self, prompt: NDArray[np.int32]) -> int:
        """Find a prompt, hashing included."""
        return self._index.find(prompt).num_hit_tokens

    def punch_holes(self, ids: NDArray[np.int32], start: int, stop: int) -> None:
        """Cache a prompt, its first part before it; drop what is kept for going on behind `start`: window blocks from
        there on are nowhere else.
        """
        assert start < stop <= len(ids)
        for part in (ids[:start], ids):
            self.finish(self._compute(part))
        for point in self._index.points.all():
            if point.position > start:
                self._index.drop_resume(point)

    @property
    def _index(self) -> PrefixIndex:
        assert self.manager.index is not None
        return self.manager.index

    def _compute(self, prompt: NDArray[np.int32]) -> int:
        return self.admit(prompt)[0]

    def _compute_rest(self, row: int, prompt: NDArray[np.int32], num_computed: int) -> None:
        while num_computed < len(prompt):
            limit = int(self.manager.chunk_limits([row])[0])
            num_new = min(_MAX_CHUNK_TOKENS, len(prompt) - num_computed, limit)
            self._reserve([row], [num_new])
            self.manager.take_copies()
            self.manager.commit([row], [num_new], prompt[num_computed : num_computed + num_new])
            num_computed += num_new

    def _reserve(self, rows: Sequence[int] | NDArray[np.int32], num_new: Sequence[int] | NDArray[np.int32]) -> None:
        if self.manager.reserve(rows, num_new).num_ok != len(rows):
            raise RuntimeError("ours: out of blocks")

    def num_full_blocks(self) -> int:
        """Count what the rows hold in the group of full attention."""
        return self._num_held(self._full)

    def num_window_blocks(self) -> int:
        """Count what the rows hold in the window's group."""
        return 0 if self._window is None else self._num_held(self._window)

    def _num_held(self, group: int) -> int:
        table = self.manager.tables[group]
        return int((table.num_blocks_per_row - table.first_block_per_row).sum())
