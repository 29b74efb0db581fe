"""Model shapes, prompts and decode steps for block managers, in the currency that all of them start from.

Token ids are int32 arrays. What a system would rather take (lists, `array('q')`) it makes of them outside the timed
part.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 16
NUM_ROWS = 256
CONTEXT = 8192
# Room for the decoded tokens of all rounds.
MAX_ROW_TOKENS = CONTEXT + 2048
# Tokens of evictable cache beside the rows.
CACHE_TOKENS = 131072
ADMITTED_TOKENS = 8192
SEARCHED_TOKENS = 32768
# Of a searched prompt with holes: its window blocks from here to one short of the end are gone.
HOLE_START = 4096
NUM_TOKENS_PAST_HOLE = 64
_VOCAB_SIZE = 128000


@dataclass(frozen=True)
class Shape:
    """A model by its KV cache groups.

    vLLM splits layers into groups of equally many: `num_window_groups`, `num_state_groups` beside one of full
    attention. SGLang, this library have one group of each kind. `block_size` is vLLM's: an attention block is as large
    as a state there.
    """

    model: str
    window: int | None = None
    num_window_groups: int = 0
    num_state_groups: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def num_groups(self) -> int:
        """Groups as vLLM builds them."""
        return 1 + self.num_window_groups + self.num_state_groups


LLAMA = Shape("Llama-3.1-8B")
GEMMA = Shape("gemma-3-27b", window=1024, num_window_groups=6)
GPT_OSS = Shape("gpt-oss-20b", window=128, num_window_groups=1)
BAMBA = Shape("Bamba-9B-v1", num_state_groups=10, block_size=528)


@dataclass(frozen=True)
class StepTokens:
    """The token that each row computes in a decode step, `[NUM_ROWS]` int32."""

    ids: NDArray[np.int32]

    @cached_property
    def as_list(self) -> list[int]:
        """Return the ids as Python integers."""
        return self.ids.tolist()


class Tokens:
    """A seeded source of token ids."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> NDArray[np.int32]:
        """Draw `[num_tokens]` int32."""
        return self._rng.integers(0, _VOCAB_SIZE, num_tokens, dtype=np.int32)


class Decode:
    """256 rows at 8,192 tokens and a few; each computes one token a step.

    Their lengths are staggered by one token: with blocks of 16 tokens 16 rows cross a block boundary in each step.
    """

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self._tokens = Tokens()
        self.lengths = CONTEXT + np.arange(NUM_ROWS) % block_size
        self.prompts = [self._tokens.draw(int(length)) for length in self.lengths]

    def next_step(self) -> StepTokens:
        """Make the next step and count it."""
        self.lengths = self.lengths + 1
        return StepTokens(self._tokens.draw(NUM_ROWS))

    def num_full_blocks(self, block_size: int) -> int:
        """Return how many blocks of full attention the rows hold."""
        return int((-(-self.lengths // block_size)).sum())

    def num_window_blocks(self, block_size: int, window: int) -> int:
        """Return how many of these hold a token that a later query can see through a window."""
        return self.num_full_blocks(block_size) - int(((self.lengths - window + 1) // block_size).sum())


class Admission:
    """Prompts of 8,192 tokens whose first `hit_percent` % were a prompt before."""

    def __init__(self, hit_percent: int) -> None:
        self._tokens = Tokens()
        self.num_shared = ADMITTED_TOKENS * hit_percent // 100
        self.shared = self._tokens.draw(self.num_shared)

    @property
    def expected_hit(self) -> int:
        """Return the tokens to be found, in whole blocks; the last token of a prompt is always computed."""
        return min(self.num_shared, ADMITTED_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE

    def next_prompt(self) -> NDArray[np.int32]:
        """Make the next prompt."""
        return np.concatenate([self.shared, self._tokens.draw(ADMITTED_TOKENS - self.num_shared)])


class Search:
    """A prompt of 32,768 tokens that is in the cache, with or without its window's blocks."""

    def __init__(self, *, has_holes: bool) -> None:
        self.prompt = Tokens().draw(SEARCHED_TOKENS)
        self.has_holes = has_holes

    @property
    def expected_hit(self) -> int:
        """Return the tokens to be found: with holes, up to where they start."""
        return HOLE_START if self.has_holes else (SEARCHED_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
