"""What the requests of a stamped world compute: token ids that often begin alike, known again by their hashes."""

from collections.abc import Hashable, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hybridkv.units import INT32_MAX

VOCABULARY = 40
_SALTS = ("left", "right")
_NUM_BASES, _NUM_ENDED = 2, 4
_HASH_BITS = 2**61 - 1


class Content:
    """One sequence: its token ids and, for each position, a hash of all that the cache depends on up to there.

    Attributes:
        salt, features: as for `CacheManager.admit`.
        hashes: [max_tokens] int32, of the tokens up to and including each position.
    """

    def __init__(self, salt: Hashable, features: Sequence[tuple[int, str]], max_tokens: int) -> None:
        self.salt, self.features = salt, tuple(features)
        self._ids = np.zeros(max_tokens, dtype=np.int32)
        self.hashes = np.zeros(max_tokens, dtype=np.int32)
        self._states = [crc32(repr(salt).encode())]

    def __len__(self) -> int:
        return len(self._states) - 1

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The token ids so far, [len]."""
        return self._ids[: len(self)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        features = dict(self.features)
        for token in tokens:
            position, state = len(self), self._states[-1]
            seen = crc32(repr((token, features.get(position))).encode())
            state = (state * 1_000_003 + seen) & _HASH_BITS
            self._ids[position] = token
            self.hashes[position] = (state ^ state >> 29) & INT32_MAX
            self._states.append(state)

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens behind the first `num_tokens`."""
        del self._states[num_tokens + 1 :]

    def copy(self) -> "Content":
        """Return a sequence that goes on from here on its own."""
        twin = Content(self.salt, self.features, len(self._ids))
        twin._ids[:], twin.hashes[:], twin._states = self._ids, self.hashes, self._states.copy()
        return twin


class Library:
    """Draws prompts: new ones, branches of a few base prompts, conversations that go on."""

    def __init__(self, rng: np.random.Generator, max_tokens: int) -> None:
        self._rng, self._max_tokens = rng, max_tokens
        self._bases = [self.draw(max_tokens) for _ in range(_NUM_BASES)]
        self._ended: list[Content] = []
        self._last: Content | None = None
        self._num_unique = 0

    def draw(self, count: int) -> list[int]:
        """Return token ids that nobody can foresee."""
        tokens: list[int] = self._rng.integers(0, VOCABULARY, count).tolist()
        return tokens

    def end(self, content: Content) -> None:
        """Remember an ended sequence, so that a conversation may go on from it."""
        self._ended = [*self._ended[1 - _NUM_ENDED :], content]

    def prompt(self, longest: int) -> Content:
        """Return a prompt of at most `longest` tokens."""
        rng = self._rng
        if self._last is not None and rng.random() < 0.2:
            return self._last.copy()
        if self._ended and rng.random() < 0.5:
            content = self._ended[rng.integers(len(self._ended))].copy()
            if rng.random() < 0.3:
                content.truncate(int(rng.integers(1, len(content) + 1)))
            content.truncate(longest)
        else:
            salt = _SALTS[int(rng.random() < 0.35)]
            # A placeholder token at position 5 that stands for one of two images.
            features = [(5, str(rng.choice(["cat", "dog"])))] if rng.random() < 0.5 else []
            content = Content(salt, features, self._max_tokens)
            base = self._bases[rng.integers(_NUM_BASES)]
            content.extend(base[: rng.integers(1, longest + 1)])
        content.extend(self.draw(int(min(rng.integers(0, 6), longest - len(content)))))
        self._last = content.copy()
        return content

    def unique_prompt(self, longest: int) -> Content:
        """Return a prompt whose tokens nobody knows: it shares nothing."""
        self._num_unique += 1
        content = Content(("unknown tokens", self._num_unique), (), self._max_tokens)
        content.extend(self.draw(int(self._rng.integers(1, longest + 1))))
        return content
