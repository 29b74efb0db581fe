"""How a system runs the workloads of a block manager: what is set up, timed, compared."""

import time
from collections.abc import Sequence
from typing import Protocol

from manager_floor import Floor
from manager_ours import Ours
from manager_peers import Ids, Manager
from manager_workloads import (
    HOLE_START,
    NUM_ROWS,
    NUM_TOKENS_PAST_HOLE,
    SEARCHED_TOKENS,
    Admission,
    Decode,
    Search,
    Shape,
    StepTokens,
)


class Run(Protocol):
    """One workload; every system is set up once, then runs the same blocks."""

    is_decode: bool
    num_rows: int

    def set_up(self, system: Manager) -> None:
        """Bring a new system to the steady state."""

    def next_block(self) -> Sequence[object]:
        """Make the inputs of a block."""

    def time_block(self, system: Manager, block: Sequence[object]) -> list[float]:
        """Run a block; return seconds of each operation."""

    def check(self, where: str, system: Manager) -> None:
        """Raise RuntimeError unless a system's output is the expected one."""


def _thread_seconds() -> float:
    return time.thread_time_ns() / 1e9


class DecodeRun:
    """Steps of 256 rows."""

    is_decode = True
    num_rows = NUM_ROWS
    num_steps = 10

    def __init__(self, shape: Shape) -> None:
        self.workload = Decode(shape.block_size)
        self._prompts = self.workload.prompts
        self._window = shape.window

    def set_up(self, system: Manager | Floor) -> None:
        """Fill rows, then the cache beside them."""
        system.fill_rows(self._prompts)
        system.fill_cache()

    def next_block(self) -> list[StepTokens]:
        """Make steps."""
        return [self.workload.next_step() for _ in range(self.num_steps)]

    def time_block(self, system: Manager | Floor, block: Sequence[StepTokens]) -> list[float]:
        """Time each step."""
        seconds = []
        for tokens in block:
            # Made here once, whatever system comes first.
            _ = tokens.as_list
            started = _thread_seconds()
            system.decode_step(tokens)
            seconds.append(_thread_seconds() - started)
            system.settle(tokens)
        return seconds

    def check(self, where: str, system: Manager | Floor) -> None:
        """Compare the blocks held."""
        expected = self.workload.num_full_blocks(system.block_size)
        _expect(f"{where}: blocks of full attention", system.num_full_blocks(), expected)
        # When a peer frees what left a window is its own affair; ours and the floor's is exact.
        if self._window is not None and isinstance(system, Ours | Floor):
            expected = self.workload.num_window_blocks(system.block_size, self._window)
            _expect(f"{where}: blocks of the window", system.num_window_blocks(), expected)


class AdmissionRun:
    """Prompts come and go, one at a time."""

    is_decode = False
    num_rows = 0
    num_prompts = 6

    def __init__(self, hit_percent: int) -> None:
        self.workload = Admission(hit_percent)

    def set_up(self, system: Manager) -> None:
        """Fill the cache, last with what the prompts share."""
        system.fill_cache()
        if self.workload.num_shared:
            row, _ = system.admit(system.prepare(self.workload.shared))
            system.finish(row)

    def next_block(self) -> list[Ids]:
        """Make prompts."""
        return [self.workload.next_prompt() for _ in range(self.num_prompts)]

    def time_block(self, system: Manager, block: Sequence[Ids]) -> list[float]:
        """Time each admission with its end; compare the tokens found."""
        seconds = []
        for ids in block:
            prompt = system.prepare(ids)
            started = _thread_seconds()
            row, num_hit = system.admit(prompt)
            system.finish(row)
            seconds.append(_thread_seconds() - started)
            _expect(f"{system.name}: tokens found", num_hit, self.workload.expected_hit)
        return seconds

    def check(self, where: str, system: Manager) -> None:
        """Compare the blocks held: none."""
        _expect(f"{where}: blocks of full attention", system.num_full_blocks(), 0)


class SearchRun:
    """One prompt is searched again and again."""

    is_decode = False
    num_rows = 0
    num_searches = 10

    def __init__(self, *, has_holes: bool, hashes: bool) -> None:
        self.workload = Search(has_holes=has_holes)
        self._hashes = hashes
        self._prompts: dict[str, object] = {}

    def set_up(self, system: Manager) -> None:
        """Fill the cache, last with the prompt."""
        system.fill_cache()
        ids = self.workload.prompt
        if self.workload.has_holes:
            system.punch_holes(ids, HOLE_START, SEARCHED_TOKENS - NUM_TOKENS_PAST_HOLE)
        else:
            row, _ = system.admit(system.prepare(ids))
            system.finish(row)
        prompt = system.prepare(ids)
        system.hash_prompt(prompt)
        self._prompts[system.name] = prompt

    def next_block(self) -> list[None]:
        """Every search is the same."""
        return [None] * self.num_searches

    def time_block(self, system: Manager, block: Sequence[None]) -> list[float]:
        """Time each search; compare the tokens found."""
        prompt, seconds = self._prompts[system.name], []
        for _ in block:
            started = _thread_seconds()
            if self._hashes:
                system.hash_prompt(prompt)
            num_hit = system.search(prompt)
            seconds.append(_thread_seconds() - started)
            _expect(f"{system.name}: tokens found", num_hit, self.workload.expected_hit)
        return seconds

    def check(self, where: str, system: Manager) -> None:
        """Compare the blocks held: none."""
        _expect(f"{where}: blocks of full attention", system.num_full_blocks(), 0)


def _expect(what: str, got: int, expected: int) -> None:
    if got != expected:
        raise RuntimeError(f"{what}: got {got}, expected {expected}")
