"""Claims about hashes of token prefixes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridkv.token_hash import NO_MATCH, FeatureKeys, UnitHasher

ROOT = Path(__file__).resolve().parents[2]


def prompt(num_units: int, unit: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and keys."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**31 - 1, num_units * unit).astype(np.int32), rng.integers(0, 3, num_units).astype(np.int32)


@pytest.mark.parametrize("unit", [1, 2, 3, 16, 48])
def test_prefill_and_decode_hash_alike(unit: int) -> None:
    """A prompt's hashes are the same whether its units come at once, in chunks, or one by one."""
    hasher = UnitHasher(unit)
    tokens, keys = prompt(37, unit)
    start = hasher.start("tenant")
    hashes, last = hasher.chain(start, tokens, keys)
    state, found = start, []
    for begin, end in ((0, 5), (5, 5), (5, 36), (36, 37)):
        part, state = hasher.chain(state, tokens[begin * unit : end * unit], keys[begin:end])
        found += part.tolist()
    assert found == hashes.tolist()
    assert state == last
    states = np.array([start])
    for i, expected in enumerate(hashes.tolist()):
        one, states = hasher.many(states, tokens[i * unit : (i + 1) * unit].reshape(1, unit), keys[i : i + 1])
        assert one[0] == expected
    assert states[0] == last


@pytest.mark.parametrize("unit", [3, 4])
def test_every_token_and_key_counts(unit: int) -> None:
    """Changing one token, one key, the order or the salt changes the hashes from there on, and no earlier one."""
    hasher = UnitHasher(unit)
    tokens, keys = prompt(8, unit)
    hashes, _ = hasher.chain(hasher.start(None), tokens, keys)
    for at in range(len(tokens)):
        other = tokens.copy()
        other[at] ^= 1
        found, _ = hasher.chain(hasher.start(None), other, keys)
        assert (found == hashes).tolist() == [i < at // unit for i in range(8)]
    other_keys = keys.copy()
    other_keys[2] += 1
    assert (hasher.chain(hasher.start(None), tokens, other_keys)[0] == hashes).tolist() == [i < 2 for i in range(8)]
    assert not (hasher.chain(hasher.start("x"), tokens, keys)[0] == hashes).any()
    swapped = tokens.reshape(8, unit)[:, ::-1].reshape(-1)
    assert hasher.chain(hasher.start(None), swapped, keys)[0][0] != hashes[0]


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0, 2, 4, 6], [1, 3, 5, 7]])
def test_hashes_are_spread(places: list[int]) -> None:
    """A million prefixes that differ in a few tokens have as many hashes, with each bit set in half of them."""
    hasher = UnitHasher(8)
    tokens = np.zeros((1_000_000, 8), dtype=np.int32)
    tokens[:, places] = np.random.default_rng(0).integers(0, 100_000, (1_000_000, 4))
    states = np.full(1_000_000, hasher.start(None))
    hashes, _ = hasher.many(states, tokens, np.zeros(1_000_000, dtype=np.int32))
    assert len(np.unique(hashes)) == 1_000_000
    bits = [int(((hashes >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert min(bits) > 497_000
    assert max(bits) < 503_000


def test_equal_salts_start_alike() -> None:
    """Salts that are equal start from one state, as a dictionary would have it; others from another one."""
    hasher = UnitHasher(4)
    assert hasher.start(1) == hasher.start(1.0) == hasher.start(True)
    assert hasher.start((1, "a")) == hasher.start((1.0, "a"))
    different = [None, "a", b"a", ("a",), (("a",),), ("a", ""), "", (), 1, -1, "\udc80"]
    assert len({int(hasher.start(salt)) for salt in different}) == len(different)
    assert UnitHasher(4, seed=1).start("a") != hasher.start("a")


def test_another_process_hashes_alike() -> None:
    """Text salts give the same hashes in a process with another hash seed."""
    code = (
        "import numpy as np; from hybridkv.token_hash import UnitHasher; h = UnitHasher(4); "
        "print(h.chain(h.start(('tenant', 'a')), np.arange(8, dtype=np.int32), np.zeros(2, np.int32))[0].tolist())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


def test_features_are_numbered_by_place_and_content() -> None:
    """Units have equal keys exactly if equal features stand at equal places in them; without any it is 0."""
    keys = FeatureKeys()
    found = keys.of_units([(1, "cat"), (5, "cat"), (10, "cat"), (13, "dog")], 5, 4).tolist()
    assert found[0] == found[1] != 0
    assert len(set(found)) == 4
    assert found[4] == 0
    assert keys.of_units([(3, "b"), (1, "a")], 1, 4).tolist() == keys.of_units([(1, "a"), (3, "b")], 1, 4).tolist()
    assert keys.of_part([(5, "cat")], 4, 6) == found[1]
    assert keys.of_part([(5, "cat")], 4, 5) == 0
    assert keys.of_part([(5, "cow")], 4, 6) == NO_MATCH


def test_forgotten_features_are_never_found_again() -> None:
    """Once there are many features, those not in use are forgotten, and no number is ever given to another one."""
    keys = FeatureKeys()
    first = keys.of_units([(0, "first"), (1, "kept")], 2, 1).tolist()
    seen = set(first)
    for content in range(10_000):
        (number,) = keys.of_units([(0, content)], 1, 1).tolist()
        assert number not in seen
        seen.add(number)
    assert keys.is_full
    keys.forget_unused({first[1]})
    assert not keys.is_full
    assert keys.of_part([(0, "kept")], 0, 1) == first[1]
    assert keys.of_part([(0, "first")], 0, 1) == NO_MATCH
    for content in ("first", "second", "third"):
        (number,) = keys.of_units([(0, content)], 1, 1).tolist()
        assert number not in seen
