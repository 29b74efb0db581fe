"""Which tokens of a sequence each lifecycle still needs.

One pure function per question, over arrays of rows:

    tokens   0 ........ first_needed_token ........ num_settled        (next query is at position num_settled)
             |  dead    |  still needed by the next query   |
"""

from math import gcd
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    Lifecycle,
    ModelSpec,
    SlidingWindow,
    State,
)
from hybridkv.units import cdiv


def first_needed_token(lifecycle: Lifecycle, num_settled: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return per row the first token that a query at position `num_settled` or later can see.

    The window counts the query itself, so a query at position n sees n-W+1: with W=128 and 158 settled tokens the
    first needed token is 31, one short of freeing a block of 32; with 159 it is 32.
    """
    match lifecycle:
        case SlidingWindow():
            return np.maximum(num_settled - lifecycle.window + 1, 0)
        case ChunkedAttention():
            return num_settled // lifecycle.chunk * lifecycle.chunk
        case FullAttention() | CrossAttention() | State():
            return np.zeros_like(num_settled)
        case _:
            assert_never(lifecycle)


def num_needed_tokens(lifecycle: Lifecycle, num_tokens: int) -> int:
    """Return the most tokens that a sequence of `num_tokens` tokens must keep at once, blocks aside; 0 for a state."""
    match lifecycle:
        case SlidingWindow():
            return min(num_tokens, lifecycle.window)
        case ChunkedAttention():
            return min(num_tokens, lifecycle.chunk)
        case CrossAttention():
            return lifecycle.max_source_tokens
        case FullAttention():
            return num_tokens
        case State():
            return 0
        case _:
            assert_never(lifecycle)


def needed_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """Return the bytes that one sequence of `num_tokens` tokens must keep, whatever the layout."""
    total = 0
    for cache, num_layers in spec.distinct_caches:
        num_needed = num_needed_tokens(cache.lifecycle, num_tokens)
        entries = (t.entry_bytes * cdiv(num_needed, t.tokens_per_entry) for t in cache.tensors if t.kind == "per_token")
        total += num_layers * (cache.bytes_per_sequence + sum(entries))
    return total


def frees_blocks(lifecycle: Lifecycle) -> bool:
    """Return whether blocks of a running sequence can become unneeded."""
    return isinstance(lifecycle, SlidingWindow | ChunkedAttention)


def end_ordinal(lifecycle: Lifecycle, num_tokens: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return per row the ordinal after the last block that `num_tokens` tokens need.

    Not for states: their rows have one block a part, whatever the tokens.
    """
    if isinstance(lifecycle, CrossAttention):
        return np.full_like(num_tokens, cdiv(lifecycle.max_source_tokens, block_size))
    return -(-num_tokens // block_size)


def max_live_blocks(lifecycle: Lifecycle, block_size: int, max_tokens: int, max_in_flight: int) -> int:
    """Return the most blocks a row of `max_tokens` tokens ever holds.

    `max_in_flight` tokens are scheduled or unsettled at once. A window or chunk with them spans
    `W - 1 + max_in_flight` tokens; the +1 is for a span that starts inside a block. A window starts anywhere, a chunk
    only at multiples of gcd(chunk, block_size).
    """
    whole = cdiv(max_tokens, block_size)
    match lifecycle:
        case SlidingWindow():
            return min(whole, cdiv(lifecycle.window - 2 + max_in_flight, block_size) + 1)
        case ChunkedAttention():
            step = gcd(lifecycle.chunk, block_size)
            return min(whole, cdiv(lifecycle.chunk - 1 + max_in_flight - step, block_size) + 1)
        case CrossAttention():
            return cdiv(lifecycle.max_source_tokens, block_size)
        case FullAttention():
            return whole
        case State():
            return 1
        case _:
            assert_never(lifecycle)
