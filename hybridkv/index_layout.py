"""What each group of a plan keeps in the prefix index.

full attention      blocks of every unit of a cached prefix, for as long as the prefix is cached
window, chunked     blocks of the units that a resume point needs
state               one set of blocks a resume point
cross-attention     nothing: the source is no part of the prefix
"""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan import CachePlan
from hybridkv.retention import first_needed_token, frees_blocks
from hybridkv.specs import Lifecycle

_UNIT_WITHOUT_BLOCKS = 64  # tokens a unit where no group keeps tokens


@dataclass(frozen=True)
class TokenGroup:
    """One self-attention group's part of a unit: `per_unit` blocks, in a node's columns from `first_column` on."""

    group_id: int
    lifecycle: Lifecycle
    block_size: int
    per_unit: int
    first_column: int

    @property
    def columns(self) -> slice:
        """The group's columns of a node's blocks."""
        return slice(self.first_column, self.first_column + self.per_unit)

    def first_ordinals(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return per position the first block that a sequence going on from there can still see."""
        return first_needed_token(self.lifecycle, positions) // self.block_size

    def first_ordinal(self, position: int) -> int:
        """Return the first block that a sequence going on from `position` can still see."""
        return int(self.first_ordinals(np.array([position]))[0])


@dataclass(frozen=True)
class IndexLayout:
    """The index's unit, in tokens, and the groups by what they keep.

    Group ids: `full` and `windowed` make up `token_groups`; `states` is beside them. A node has the columns of the full
    groups first, then those of the windowed ones.
    """

    unit: int
    places: tuple[TokenGroup, ...]
    full: tuple[int, ...]
    windowed: tuple[int, ...]
    states: tuple[int, ...]
    num_parts: tuple[int, ...]
    block_bytes: tuple[int, ...]

    @classmethod
    def of(cls, plan: CachePlan) -> "IndexLayout":
        """Return the layout of a plan's groups."""
        groups = plan.groups
        states = tuple(g for g, group in enumerate(groups) if group.group.is_state)
        windowed = tuple(g for g, group in enumerate(groups) if frees_blocks(group.group.lifecycle))
        full = tuple(g for g, group in enumerate(groups) if group.group.lifecycle.kind == "full_attention")
        sizes = {g: groups[g].block_size for g in (*full, *windowed)}
        unit = lcm(*sizes.values()) if sizes else _UNIT_WITHOUT_BLOCKS
        places, column = [], 0
        for g, size in sizes.items():
            places.append(TokenGroup(g, groups[g].group.lifecycle, size, unit // size, column))
            column += unit // size
        return cls(
            unit,
            tuple(sorted(places, key=lambda place: place.group_id)),
            full,
            windowed,
            states,
            tuple(groups[g].num_parts for g in states),
            tuple(group.block_stride_bytes for group in groups),
        )

    @cached_property
    def token_groups(self) -> tuple[int, ...]:
        """Groups that keep tokens, in the order of `places`."""
        return tuple(place.group_id for place in self.places)

    @cached_property
    def full_places(self) -> tuple[TokenGroup, ...]:
        """The full-attention groups."""
        return tuple(place for place in self.places if place.group_id in self.full)

    @cached_property
    def windows(self) -> tuple[TokenGroup, ...]:
        """The windowed groups, in the order of `windowed`."""
        return tuple(place for place in self.places if place.group_id in self.windowed)

    @cached_property
    def num_full_columns(self) -> int:
        """Blocks of the full-attention groups in one unit."""
        return sum(place.per_unit for place in self.full_places)

    @cached_property
    def num_window_columns(self) -> int:
        """Blocks of the windowed groups in one unit."""
        return sum(place.per_unit for place in self.windows)

    @cached_property
    def num_state_blocks(self) -> int:
        """Blocks of all states of one sequence."""
        return sum(self.num_parts)

    def place_of(self, group: int) -> TokenGroup | None:
        """Return the group's part of a unit, None if it keeps no tokens."""
        return next((place for place in self.places if place.group_id == group), None)
