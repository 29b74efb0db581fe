"""Hashes of token prefixes, a unit of tokens at a time.

    prefix     | unit 0 | unit 1 | unit 2 |      state_i = A * state_(i-1) + digest(unit i)   (mod 2**64)
    hash           h0       h1       h2          h_i = mix(state_i): of everything up to and with unit i

The recurrence is linear, so a prompt's states are one cumulative sum. The hash is fast, not cryptographic: whoever
finds an equal one still compares tokens.
"""

from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hybridkv.units import INT32_MAX

Features = Sequence[tuple[int, Hashable]]
NO_MATCH = -1  # the key of features that no cached unit has

_STEP = 0x9E3779B97F4A7C15  # odd, hence invertible
_INVERSE_STEP = pow(_STEP, -1, 2**64)
_KEY_WEIGHT = np.uint64(0xD6E8FEB86659FD93)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_UINT64 = 2**64 - 1
_NO_CONTENT = 0xA0761D6478BD642F  # of None, whose own hash is its address
_MIN_KEPT_KEYS = 4096


class UnitHasher:
    """Chained hashes of prefixes at multiples of `unit` tokens."""

    def __init__(self, unit: int, seed: int = 0) -> None:
        self.unit = unit
        self._seed = seed
        # Splitmix64, which anybody can write down: other processes and languages are to find the same hashes.
        counters = np.arange(1, unit + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(seed & _UINT64)
        self._weights = _mix(counters) | np.uint64(1)
        self._pair_weights = self._weights[: unit // 2]
        self._powers = np.ones(1, dtype=np.uint64)
        self._inverse_powers = np.ones(1, dtype=np.uint64)

    def start(self, salt: Hashable) -> np.uint64:
        """Return the state before the first token of a sequence; equal salts give equal states.

        None, integers, strings, bytes and tuples of them give the same state in every process.
        """
        return np.uint64((_content_hash(salt) + self._seed * _INVERSE_STEP) & _UINT64)

    def states(self, start: np.uint64, tokens: NDArray[np.int32], keys: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the states after each unit of one sequence.

        Shapes: tokens [n * unit] or [n, unit] int32; keys [n]; returns [n]
        """
        num_units = len(keys)
        self._grow_powers(num_units)
        digests = self._digests(tokens.reshape(num_units, self.unit), keys)
        digests *= self._inverse_powers[1 : num_units + 1]
        states = np.cumsum(digests, dtype=np.uint64)
        states += start
        states *= self._powers[1 : num_units + 1]
        return states

    def chain(
        self, start: np.uint64, tokens: NDArray[np.int32], keys: NDArray[np.int32]
    ) -> tuple[NDArray[np.uint64], np.uint64]:
        """Return the hashes of each unit of one sequence, and the state to go on from.

        Shapes: tokens [n * unit] or [n, unit] int32; keys [n]; returns [n], scalar
        """
        states = self.states(start, tokens, keys)
        return self.finish(states), np.uint64(states[-1]) if len(states) else start

    def many(
        self, states: NDArray[np.uint64], tokens: NDArray[np.int32], keys: NDArray[np.int32]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the hashes and the states after one more unit of each of many sequences.

        Shapes: states [R]; tokens [R, unit] int32; keys [R]; returns [R], [R]
        """
        after = states * np.uint64(_STEP) + self._digests(tokens, keys)
        return self.finish(after), after

    def finish(self, states: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the hashes that stand for the states; a test may override it to make hashes collide."""
        return _mix(states)

    def _digests(self, tokens: NDArray[np.int32], keys: NDArray[np.int32]) -> NDArray[np.uint64]:
        if self.unit % 2:
            sums = tokens.astype(np.uint64) @ self._weights
        else:
            # Two tokens to a word: half the work. The fold lets the high one reach every bit of the product.
            pairs = np.ascontiguousarray(tokens, dtype=np.int32).view(np.uint64)
            folded = pairs ^ (pairs >> _HALF)
            sums = folded @ self._pair_weights
        sums += keys.astype(np.uint64) * _KEY_WEIGHT
        return _mix(sums)

    def _grow_powers(self, num_units: int) -> None:
        while len(self._powers) <= num_units:
            have = len(self._powers)
            self._powers = _doubled_powers(self._powers, pow(_STEP, have, 2**64))
            self._inverse_powers = _doubled_powers(self._inverse_powers, pow(_INVERSE_STEP, have, 2**64))


class FeatureKeys:
    """Numbers for what stands at placeholder tokens: images, audio.

    Equal features at equal places of a unit have one number, others another one; 0 is no feature. A number is never
    used again, so one that was forgotten can only make a prefix miss.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[tuple[int, Hashable], ...], int] = {}
        self._next = 1
        self._keep = _MIN_KEPT_KEYS

    def of_units(self, features: Features, num_units: int, unit: int) -> NDArray[np.int32]:
        """Return the key of each of the first `num_units` units.

        Shapes: returns [num_units] int32
        """
        keys = np.zeros(num_units, dtype=np.int32)
        by_unit: dict[int, list[tuple[int, Hashable]]] = {}
        for position, feature in features:
            by_unit.setdefault(position // unit, []).append((position % unit, feature))
        for idx, placed in by_unit.items():
            if 0 <= idx < num_units:
                keys[idx] = self._number(_in_order(placed))
        return keys

    def of_part(self, features: Features, begin: int, end: int) -> int:
        """Return the key of a unit's tokens from its `begin` to `end`; `NO_MATCH` if nobody has used it yet."""
        placed = [(position - begin, feature) for position, feature in features if begin <= position < end]
        return self._keys.get(_in_order(placed), NO_MATCH) if placed else 0

    def forget_unused(self, used: Iterable[int]) -> None:
        """Forget numbers outside `used`, all but the latest ones, which prompts on their way in may still bring."""
        latest = self._next - _MIN_KEPT_KEYS
        kept = set(used)
        self._keys = {placed: key for placed, key in self._keys.items() if key >= latest or key in kept}
        self._keep = 2 * len(self._keys) + _MIN_KEPT_KEYS

    @property
    def is_full(self) -> bool:
        """Whether it is time for `forget_unused`."""
        return len(self._keys) > self._keep

    def _number(self, placed: tuple[tuple[int, Hashable], ...]) -> int:
        key = self._keys.get(placed)
        if key is None:
            if self._next == INT32_MAX:
                return NO_MATCH
            key = self._keys[placed] = self._next
            self._next += 1
        return key


def _in_order(placed: list[tuple[int, Hashable]]) -> tuple[tuple[int, Hashable], ...]:
    return tuple(sorted(placed, key=lambda pair: pair[0]))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = values ^ (values >> np.uint64(30))
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _doubled_powers(powers: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
    return np.concatenate([powers, powers * np.uint64(factor)])


def _content_hash(value: Hashable) -> int:
    """Return 64 bits that are equal for equal values."""
    if isinstance(value, str | bytes):
        data = b"s" + value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b"b" + value
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    if isinstance(value, tuple):
        combined = len(value)
        for item in value:
            combined = (combined * _STEP + _content_hash(item)) & _UINT64
        return combined
    return _NO_CONTENT if value is None else (hash(value) * _STEP) & _UINT64
