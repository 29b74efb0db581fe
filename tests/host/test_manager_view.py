"""Claims about the views of a manager: they show everything that is there, and change nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.row_lengths import RowState
from tests.host.test_manager_random import SHAPES, make_world
from tests.manager_steps import feed, serve
from tests.models import gemma_like, limits, plan_slabs
from tests.snapshots import snapshot


def gemma(num_slabs: int = 60, every: int | None = None) -> CacheManager:
    """Group 0 with a window of 6 tokens, group 1 with full attention, units of 4 tokens."""
    plan = plan_slabs(gemma_like(1, 1, window=6), num_slabs, limits(max_num_seqs=4))
    policy = ResumePolicy(every=every, prompt_end=False, branches=False)
    return CacheManager(plan, options=ManagerOptions(resume_points=policy))


def check_rows(manager: CacheManager, document: dict, text: str) -> None:
    """Every row that is not free is named, with its state, lengths and blocks."""
    taken = np.flatnonzero(manager.row_states != RowState.FREE).tolist()
    assert [row["row"] for row in document["rows"]] == taken
    for row in document["rows"]:
        number = row["row"]
        assert row["state"] == RowState(manager.row_states[number]).name
        lengths = manager.num_committed_tokens, manager.num_settled_tokens, manager.num_computed_tokens
        assert [row["committed"], row["settled"], row["computed"]] == [int(of[number]) for of in lengths]
        assert row["capacity"] == manager.capacity_tokens[number]
        for group, table in zip(row["groups"], manager.tables, strict=True):
            assert group["block_ids"] == table.row_block_ids(number).tolist()
            assert group["first_ordinal"] == table.first_block_per_row[number]
        line = f"  row {number} {row['state']}: {row['committed']} committed, {row['settled']} settled, "
        assert line + f"{row['computed']} computed, {row['capacity']} reserved" in text


def check_tree(manager: CacheManager, document: dict, text: str) -> None:
    """Every unit is on one run, below the right one; every point is named with its place and groups."""
    index = manager.index
    assert index is not None
    of, unit, layout = index.trunk.nodes, index.unit, index.layout
    salts = {root: repr(salt) for salt, root in index.trunk.roots.items()}
    assert [prefix["salt"] for prefix in document["prefixes"]] == list(salts.values())
    found, ends = [], {}
    for prefix in document["prefixes"]:
        for number, run in enumerate(prefix["runs"]):
            begin = 0 if run["parent"] is None else prefix["runs"][run["parent"]]["end"]
            assert run["begin"] == begin < run["end"]
            ends[run["last_hash"]] = prefix["salt"], number
    live = np.flatnonzero(of.live & (of.depth > 0)).tolist()
    num_units = sum((r["end"] - r["begin"]) // unit for prefix in document["prefixes"] for r in prefix["runs"])
    assert num_units == len(live) == document["metrics"]["pool"]["units"]
    # A run ends where nothing follows or several things do.
    assert set(ends) == {int(of.hash[node]) for node in live if of.num_children[node] != 1}
    for prefix in document["prefixes"]:
        for points in (prefix["points"], *(run["points"] for run in prefix["runs"])):
            for point in points:
                found.append((prefix["salt"], point["position"], point["groups"], point["tail_tokens"]))
                assert f"resume point at {point['position']}: groups {', '.join(map(str, point['groups']))}" in text
    expected = []
    for point in index.points.all():
        tail = point.contents.tail_tokens.tolist()
        groups = {*(layout.token_groups if tail else layout.windowed), *(layout.states if point.states.size else ())}
        expected.append((salts[int(of.lineage(point.node)[0])], point.position, sorted(groups), tail))
    assert sorted(found) == sorted(expected)
    assert text.count("resume point at") - text.count("next resume point") == len(expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_view_names_every_row_and_point(shape: str) -> None:
    """After any verbs rows, units and points are all there, once; JSON holds them; text and data say the same."""
    num_points = 0
    for seed in range(4):
        world = make_world(shape, seed)
        for _ in range(6):
            world.run(20)
            document, text = world.manager.snapshot(), world.manager.describe(10_000)
            assert json.loads(json.dumps(document)) == document
            check_rows(world.manager, document, text)
            assert len(text.splitlines()) < 10_000
            if world.manager.index is None:
                assert document["prefixes"] == []
                assert text.endswith("prefixes: not cached")
            else:
                check_tree(world.manager, document, text)
                num_points += world.manager.index.num_resume_points
    assert num_points > 0


def test_looking_changes_nothing() -> None:
    """A manager is the same before and after it was described, and two looks say the same."""
    world = make_world("window and state", 1)
    world.run(60)
    before = snapshot(world.manager)
    seen = world.manager.describe(), world.manager.snapshot()
    assert snapshot(world.manager) == before
    assert (world.manager.describe(), world.manager.snapshot()) == seen


def test_the_text_is_what_a_person_reads() -> None:
    """Groups, rows and the tree, branches indented, runs of units on one line, points behind the run they hang on."""
    manager = gemma(every=8)
    serve(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], salt="tenant")
    row = manager.admit([1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 24], salt="tenant").admitted_row
    feed(manager, row, [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 24])
    paused = manager.admit(5).admitted_row
    manager.preempt(paused)
    lines = manager.describe().splitlines()
    assert lines[0].startswith("pool: 60 slabs of ")
    assert lines[1].startswith("  group 0 (sliding_window, 4 tokens a block): ")
    assert lines[2].startswith("  group 1 (full_attention, 4 tokens a block): ")
    assert lines[3] == "rows: 2"
    assert lines[4].startswith("  row 0 RUNNING: 13 committed, 13 settled, 13 computed, 13 reserved; 12 in the tree; ")
    assert "next resume point at 16; group 0 from 2: " in lines[4]
    assert lines[5] == "  row 1 PREEMPTED: 0 committed, 0 settled, 0 computed, 0 reserved"
    assert lines[6:] == [
        "prefixes: 4 units of 4 tokens, 2 resume points",
        "  salt 'tenant'",
        "    [0, 8) 2 units: 1 2 3 4 5 6 7 8",
        "      resume point at 8: groups 0",
        "      [8, 12) 1 unit: 9 10 11 12",
        "        resume point at 14: groups 0, 1, tail 13 14",
        "      [8, 12) 1 unit: 20 21 22 23; rows 0",
    ]


def test_the_text_is_as_long_as_asked() -> None:
    """Of more lines than wanted the last one says how many are left out; long lists of blocks and tokens are cut."""
    manager = gemma(600)
    for first in range(30):
        serve(manager, [first, *range(1, 14)], salt="a name of a tenant that is longer than anybody wants to read " * 3)
    full = manager.describe(1000)
    cut = manager.describe(12).splitlines()
    assert cut[:11] == full.splitlines()[:11]
    assert cut[11] == f"... {len(full.splitlines()) - 11} more lines"
    assert max(map(len, full.splitlines())) < 150
    assert "units: 0 1 2 3 4 5 6 7 .." in full
    assert manager.describe(len(full.splitlines())) == full
    with pytest.raises(ValueError, match="max_lines: got 0"):
        manager.describe(0)


def test_scattered_blocks_are_counted() -> None:
    """A row's blocks are listed as runs of ids, of many runs the first eight and the number of blocks."""
    plan = plan_slabs(gemma_like(1, 1, window=6), 100, limits(max_num_seqs=2, max_model_len=160))
    manager = CacheManager(plan, options=ManagerOptions(prefix_caching=False))
    rows = [manager.admit(80).admitted_row for _ in range(2)]
    for _ in range(20):
        for row in rows:
            manager.reserve([row], [4])
            manager.commit([row], [4])
    lines = [line for line in manager.describe().splitlines() if line.startswith("  row")]
    assert all(line.endswith(".. (20 blocks)") for line in lines), lines
    (of_group,) = [part for part in lines[0].split("; ") if part.startswith("group 1")]
    assert len(of_group.removeprefix("group 1 from 0: ").split(" .. ")[0].split()) == 8


def test_a_row_that_lost_its_place_says_so() -> None:
    """A row whose units were dropped from under it is shown without tokens in the tree."""
    manager = gemma()
    row = manager.admit([*range(16)]).admitted_row
    feed(manager, row, [*range(16)])
    assert "16 in the tree" in manager.describe()
    assert manager.index is not None
    manager.index.drop_blocks(manager._store.row_blocks(1, row))
    text = manager.describe()
    assert "in the tree" not in text
    assert f"row {row} RUNNING: 16 committed" in text
    assert "prefixes: 0 units" in text
