"""Claims about which tokens each lifecycle still needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.retention import end_ordinal, first_needed_token, frees_blocks, max_live_blocks
from hybridkv.specs import ChunkedAttention, CrossAttention, FullAttention, Lifecycle, SlidingWindow, State

FULL, CROSS, STATE = FullAttention(), CrossAttention(max_source_tokens=10), State(family="mamba2")


def sees(lifecycle: Lifecycle, query: int, key: int) -> bool:
    """The definition of the masks, token by token."""
    if key > query:
        return False
    if isinstance(lifecycle, SlidingWindow):
        return query - key < lifecycle.window
    if isinstance(lifecycle, ChunkedAttention):
        return key // lifecycle.chunk == query // lifecycle.chunk
    return True


def num_freed(lifecycle: Lifecycle, settled: int, block_size: int) -> int:
    """Blocks that `settled` settled tokens free."""
    return int(first_needed_token(lifecycle, np.array([settled]))[0]) // block_size


def worst_live_blocks(lifecycle: Lifecycle, block_size: int, max_tokens: int, max_in_flight: int) -> int:
    """Most blocks a row holds over every settled length and every step that may follow it."""
    worst = 0
    for settled in range(max_tokens):
        end = min(settled + max_in_flight, max_tokens)
        worst = max(worst, -(-end // block_size) - num_freed(lifecycle, settled, block_size))
    return worst


def test_window_frees_by_settled_tokens() -> None:
    """With W=128 and blocks of 32, 158 settled tokens free no block, 159 free one: law 6."""
    window = SlidingWindow(window=128)
    assert num_freed(window, 158, 32) == 0
    assert num_freed(window, 159, 32) == 1
    assert num_freed(window, 190, 32) == 1
    assert num_freed(window, 191, 32) == 2


def test_chunk_frees_at_its_boundary() -> None:
    """With C=64 and blocks of 32, 63 settled tokens free no block and 64 free the chunk's two."""
    chunked = ChunkedAttention(chunk=64)
    assert [num_freed(chunked, settled, 32) for settled in (0, 63, 64, 127, 128)] == [0, 0, 2, 2, 4]


def test_chunk_boundary_inside_a_block_keeps_the_block() -> None:
    """A block that holds the chunk's first token stays, though its other tokens are dead."""
    assert [num_freed(ChunkedAttention(chunk=6), settled, 4) for settled in (5, 6, 11, 12)] == [0, 1, 1, 3]


@given(
    lifecycle=st.one_of(
        st.builds(SlidingWindow, window=st.integers(1, 40)),
        st.builds(ChunkedAttention, chunk=st.integers(1, 40)),
        st.sampled_from([FULL, STATE]),
    ),
    settled=st.lists(st.integers(0, 90), min_size=1, max_size=4),
)
def test_first_needed_token_is_the_first_one_seen(lifecycle: Lifecycle, settled: list[int]) -> None:
    """The first needed token is the first that the next query sees, and later queries see nothing before it."""
    first = first_needed_token(lifecycle, np.array(settled))
    for row, next_query in enumerate(settled):
        assert first[row] == min(key for key in range(next_query + 1) if sees(lifecycle, next_query, key))
        later = range(next_query, next_query + 45)
        assert not any(sees(lifecycle, query, key) for query in later for key in range(first[row]))


def test_only_windows_and_chunks_free_blocks() -> None:
    """Blocks of a running sequence become unneeded under a window or chunks, and under nothing else."""
    lifecycles = [SlidingWindow(window=4), ChunkedAttention(chunk=4), FULL, CROSS, STATE]
    assert [frees_blocks(lifecycle) for lifecycle in lifecycles] == [True, True, False, False, False]


def test_cross_attention_never_frees() -> None:
    """A cross-attention row needs its first source token at every length."""
    assert first_needed_token(CROSS, np.array([0, 5, 1000])).tolist() == [0, 0, 0]


def test_end_ordinal_counts_started_blocks() -> None:
    """A block counts from its first token on, and no tokens need none."""
    assert end_ordinal(FULL, np.array([0, 1, 4, 5, 8, 9]), 4).tolist() == [0, 1, 1, 2, 2, 3]
    assert end_ordinal(SlidingWindow(window=2), np.array([9]), 4).tolist() == [3]


def test_end_ordinal_of_cross_attention_is_the_sources() -> None:
    """A cross-attention row holds its source's blocks, however long the sequence."""
    assert end_ordinal(CROSS, np.array([0, 1, 500]), 4).tolist() == [3, 3, 3]


@settings(max_examples=150)
@given(
    lifecycle=st.one_of(
        st.builds(SlidingWindow, window=st.integers(1, 30)),
        st.builds(ChunkedAttention, chunk=st.integers(1, 30)),
        st.just(FULL),
    ),
    block_size=st.integers(1, 9),
    max_tokens=st.integers(1, 80),
    max_in_flight=st.integers(1, 20),
)
def test_max_live_blocks_is_never_exceeded(
    lifecycle: Lifecycle, block_size: int, max_tokens: int, max_in_flight: int
) -> None:
    """No schedule of steps makes a row hold more blocks than the bound, nor more than its whole length needs."""
    bound = max_live_blocks(lifecycle, block_size, max_tokens, max_in_flight)
    assert worst_live_blocks(lifecycle, block_size, max_tokens, max_in_flight) <= bound
    assert bound <= -(-max_tokens // block_size)


@given(
    lifecycle=st.one_of(
        st.builds(SlidingWindow, window=st.integers(1, 30)), st.builds(ChunkedAttention, chunk=st.integers(1, 30))
    ),
    block_size=st.integers(1, 9),
    in_flight=st.integers(1, 20),
)
def test_max_live_blocks_is_reached(lifecycle: Lifecycle, block_size: int, in_flight: int) -> None:
    """Some schedule fills the bound, wherever windows and chunks start: a ring one column narrower would not do."""
    bound = max_live_blocks(lifecycle, block_size, 400, in_flight)
    assert worst_live_blocks(lifecycle, block_size, 400, in_flight) == bound


@pytest.mark.parametrize(("lifecycle", "expected"), [(FULL, 25), (CROSS, 3), (STATE, 1)])
def test_max_live_blocks_without_a_window(lifecycle: Lifecycle, expected: int) -> None:
    """Full attention holds its whole length, cross attention its source, a state one block."""
    assert max_live_blocks(lifecycle, 4, 100, 8) == expected
