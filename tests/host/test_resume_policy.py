"""Claims about where resume points are wanted."""

import numpy as np
import pytest

from hybridkv.errors import SpecError
from hybridkv.resume_policy import NO_POSITION, ResumePolicy


def walk(policy: ResumePolicy, num_prompt: int, shared: int, end: int, unit: int = 1) -> list[int]:
    """All positions at which a row is kept on its way to `end`."""
    found, at = [], 0
    while (position := policy.next_position(at, num_prompt, shared, unit)) is not None and position <= end:
        assert position > at
        found.append(position)
        at = position
    return found


def test_each_rule_names_its_positions() -> None:
    """Fixed steps, the prompt's end and the branch each add their positions, in order."""
    nothing = ResumePolicy(prompt_end=False, branches=False)
    assert walk(nothing, 100, 30, 500) == []
    assert walk(ResumePolicy(every=64, prompt_end=False, branches=False), 100, 30, 200) == [64, 128, 192]
    assert walk(ResumePolicy(branches=False), 100, 30, 200) == [99]
    assert walk(ResumePolicy(prompt_end=False), 100, 30, 200) == [30]
    assert walk(ResumePolicy(every=64), 100, 30, 200) == [30, 64, 99, 128, 192]


def test_positions_are_whole_units() -> None:
    """With a unit, steps are rounded up, the prompt's end and the branch down, and nothing is kept at 0."""
    assert walk(ResumePolicy(every=50), 100, 40, 200, unit=16) == [32, 64, 96, 128, 192]
    assert walk(ResumePolicy(), 96, 0, 200, unit=16) == [80]
    assert walk(ResumePolicy(), 16, 15, 200, unit=16) == []


def test_the_prompt_ends_before_its_volatile_suffix() -> None:
    """Tokens that the next prompt will not repeat are left out; a prompt that is nothing else has no end."""
    assert walk(ResumePolicy(volatile_suffix_tokens=7), 100, 0, 200) == [93]
    assert walk(ResumePolicy(volatile_suffix_tokens=7), 5, 0, 200) == []


def test_rows_are_answered_at_once() -> None:
    """`positions` answers for many rows what it answers for each, and takes `start` itself."""
    policy = ResumePolicy(every=8, volatile_suffix_tokens=2)
    start, prompts, shared = np.array([0, 8, 9, 40]), np.array([30, 9, 30, 30]), np.array([4, 0, 20, 0])
    found = policy.positions(start, prompts, shared)
    assert found.tolist() == [4, 8, 16, 40]
    each = [int(policy.positions(*row)) for row in zip(start, prompts, shared, strict=True)]
    assert found.tolist() == each
    assert ResumePolicy(prompt_end=False).positions([5], [30], [4]).tolist() == [NO_POSITION]


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": 1.5}, {"volatile_suffix_tokens": -1}, {"max_per_path": 0}, {"finish": 1}]
)
def test_wrong_policies_are_refused(wrong: dict[str, object]) -> None:
    """A policy with a value that means nothing is refused, by name."""
    with pytest.raises(SpecError, match=next(iter(wrong))):
        ResumePolicy(**wrong)
