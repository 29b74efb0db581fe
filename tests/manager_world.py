"""An engine that drives a manager at random and knows what every block must contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridkv.admission import Verdict
from hybridkv.copy_list import BlockCopies
from hybridkv.errors import OutOfBlocks
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.plan import CachePlan
from hybridkv.row_lengths import RowState
from hybridkv.swapping import host_plan
from tests.manager_content import Content, Story, pending, shared_writable


@dataclass(frozen=True)
class _Flight:
    """A launched step: its number, the flat blocks its kernels may touch."""

    number: int
    touched: frozenset[int]


class World:
    """An engine that drives a manager at random, and sees after every verb that every block is what it should be."""

    def __init__(self, plan: CachePlan, options: ManagerOptions, seed: int, vocabulary: int = 3) -> None:
        self.plan, self.rng, self.vocabulary = plan, np.random.default_rng(seed), vocabulary
        self.manager = CacheManager(plan, options=options)
        host = host_plan(plan, options.host_bytes) if options.host_bytes else None
        self.content = Content(plan, host)
        self.running: dict[int, Story] = {}
        self.paused: dict[int, Story] = {}
        self.ended: list[Story] = []
        self.flights: list[_Flight] = []
        self.done: Counter[str] = Counter()
        self.max_len = min(plan.limits.max_model_len, plan.longest_sequence())
        self.prompts = [self.tokens(min(26, self.max_len)) for _ in range(3)]
        take = self.manager.pool.take
        self.manager.pool.take = lambda counts: self._watch(take(counts))  # type: ignore[method-assign]

    def _watch(self, flat: np.ndarray) -> np.ndarray:
        """Nothing that a step in flight may touch is lent."""
        for flight in self.flights:
            assert flight.touched.isdisjoint(flat.tolist()), "a block that a step in flight touches was lent"
        return flat

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return self.rng.integers(0, self.vocabulary, size=count).tolist()

    def pick(self, rows: Iterable[int], most: int = 3) -> list[int]:
        """Some of the rows, in any order."""
        rows = sorted(rows)
        count = int(self.rng.integers(0, min(len(rows), most) + 1))
        return [int(row) for row in self.rng.permutation(rows)[:count]] if rows else []

    def idle_rows(self) -> list[int]:
        """Running rows without a token in flight or uncommitted."""
        committed = self.manager.num_committed_tokens
        return [row for row, story in self.running.items() if committed[row] == story.computed]

    # Verbs

    def run(self, num_steps: int) -> None:
        """Do random verbs, and look at everything after each."""
        verbs = [self.admit, self.admit, *[self.step] * 7, *[self.launch] * 3, *[self.settle] * 3, self.commit]
        verbs += [
            self.draft,
            self.fork,
            self.reorder,
            self.preempt,
            self.resume,
            self.resume,
            self.finish,
            self.finish,
            self.move,
        ]
        verbs += [self.compact, self.copy, self.evict]
        order = self.rng.integers(len(verbs), size=num_steps)
        for number in order.tolist():
            name = verbs[number].__name__
            verbs[number]()
            self.done[name] += 1
            self.look()

    def admit(self) -> None:
        """A prompt that begins like others, or the rest of a conversation."""
        base = self.prompts[int(self.rng.integers(len(self.prompts)))]
        tokens = base[: int(self.rng.integers(1, len(base) + 1))]
        if self.rng.random() < 0.3:
            tokens = (tokens + self.tokens(int(self.rng.integers(1, 9))))[: self.max_len]
        salt = "other" if self.rng.random() < 0.15 else None
        features = (((2, "image"),), ((2, "other image"), (9, "sound")), *[()] * 6)[int(self.rng.integers(8))]
        if self.ended and self.rng.random() < 0.4:
            last = self.ended[int(self.rng.integers(len(self.ended)))]
            salt, features = last.salt, last.features
            tokens = (last.tokens + self.tokens(int(self.rng.integers(1, 5))))[: self.max_len]
        features = tuple(pair for pair in features if pair[0] < len(tokens))
        external = int(self.rng.integers(0, len(tokens))) if self.rng.random() < 0.2 else 0
        prompt = tokens if self.rng.random() < 0.95 else len(tokens)
        answer = self.manager.admit(prompt, external_tokens=external, salt=salt, features=features)
        assert answer.verdict != Verdict.NEVER
        if answer.row is None:
            assert answer.verdict == Verdict.LATER
            if not (self.running or self.paused or self.flights):
                self.copy()
                assert self.manager.admit(tokens, salt=salt, features=features).row is not None, (
                    "nothing runs: it hangs"
                )
                self.manager.finish(int(np.flatnonzero(self.manager.row_states == RowState.RUNNING)[0]))
            self.done["no row" if "rows are taken" in answer.reason else "later"] += 1
            return
        self.done["hit"] += answer.num_hit_tokens > 0
        self.done["tail hit"] += answer.num_hit_tokens % 4 > 0
        story = Story(salt, features, tokens, len(tokens), answer.num_hit_tokens)
        self.running[answer.row] = story
        external = min(external, len(tokens) - 1)
        if external > story.computed:
            self.copy()
            begin = story.computed
            self.content.write(self.manager, answer.row, story, external)
            self.manager.commit([answer.row], [external - begin], tokens[begin:external])

    def _plan_step(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Reserve what rows are to compute next; rows that get nothing are dropped, and one may be preempted."""
        limits = self.manager.chunk_limits(rows)
        in_flight = self.plan.limits.max_in_flight
        chosen, counts = [], []
        for row, limit in zip(rows, limits.tolist(), strict=True):
            story = self.running[row]
            unsettled = story.computed - int(self.manager.num_committed_tokens[row])
            left = story.num_prompt - story.computed
            most = left if left > 0 and self.rng.random() < 0.8 else int(self.rng.integers(1, 4))
            count = min(most, limit, in_flight - unsettled, self.max_len - story.computed)
            if count > 0:
                chosen.append(row)
                counts.append(count)
        if not chosen:
            return [], []
        outcome = self.manager.reserve(chosen, counts)
        if outcome.num_ok < len(chosen):
            assert (outcome.shortfall[:, outcome.num_ok :].sum(axis=0) > 0).all()
            alone = len(self.running) == 1 and not self.flights and not len(pending(self.manager))
            assert not alone, "a row alone in the pool gets no blocks"
            victims = [row for row in self.running if row not in chosen[: outcome.num_ok]]
            self._pause(victims[int(self.rng.integers(len(victims)))])
        for row, count in zip(chosen[: outcome.num_ok], counts, strict=False):
            story = self.running[row]
            story.tokens += self.tokens(max(story.computed + count - len(story.tokens), 0))
        return chosen[: outcome.num_ok], counts[: outcome.num_ok]

    def _compute(self, rows: list[int], counts: list[int]) -> None:
        self.copy()
        for row, count in zip(rows, counts, strict=True):
            self.content.write(self.manager, row, self.running[row], self.running[row].computed + count)

    def step(self) -> None:
        """A step of an engine that waits for it."""
        rows, counts = self._plan_step(self.pick(self.idle_rows()))
        begins = [self.running[row].computed for row in rows]
        self._compute(rows, counts)
        ids = [self.running[row].tokens[b : b + n] for row, b, n in zip(rows, begins, counts, strict=True)]
        unknown = self.rng.random() < 0.02
        self.manager.commit(rows, counts, None if unknown else [token for part in ids for token in part])

    def launch(self) -> None:
        """A step in flight."""
        self._launch(*self._plan_step(self.pick(self.running)))

    def _launch(self, rows: list[int], counts: list[int]) -> None:
        if not rows:
            return
        store = self.manager._store
        self._compute(rows, counts)
        touched = {int(b) for row in rows for g in range(store.num_groups) for b in store.row_blocks(g, row)}
        number = self.manager.launch(rows, counts)
        self.flights.append(_Flight(number, frozenset(touched)))

    def settle(self) -> None:
        """The oldest steps in flight end."""
        if self.flights:
            last = int(self.rng.integers(min(2, len(self.flights))))
            number = self.flights[last].number
            self.flights = self.flights[last + 1 :]
            self.manager.settle(number)
            if self.rng.random() < 0.7:
                self.look()
                self.commit()

    def commit(self) -> None:
        """Settled tokens become final, all or some of them."""
        manager, rows, counts, ids = self.manager, [], [], []
        for row in self.pick(self.running, 8):
            settled, committed = int(manager.num_settled_tokens[row]), int(manager.num_committed_tokens[row])
            if settled > committed:
                rows.append(row)
                counts.append(settled - committed if self.rng.random() < 0.8 else 1)
                ids += self.running[row].tokens[committed : committed + counts[-1]]
        manager.commit(rows, counts, ids)

    def draft(self) -> None:
        """A step whose tokens turn out wrong in part, and are taken back at once or after another step."""
        rows = self.pick(self.idle_rows(), 2)
        self._try(lambda: self.manager.checkpoint(rows))
        rows, counts = self._plan_step([row for row in rows if row in self.running])
        if not rows:
            return
        self.look()
        self._launch(rows, counts)
        if self.rng.random() < 0.5:
            self.look()
            self._launch(*self._plan_step(self.pick(set(self.running) - set(rows))))
        for row, count in zip(rows, counts, strict=True):
            wrong = int(self.rng.integers(0, count + 1))
            if row in self.running and self.manager.can_roll_back([row], [wrong])[0]:
                story = self.running[row]
                accepted = max(story.computed - wrong, story.num_prompt)
                left = int(self.manager.roll_back([row], [wrong])[0])
                assert left <= story.computed - wrong
                story.computed = left
                story.cut(max(accepted, left))
                self.done["rolled back"] += wrong > 0
                self.look()

    def fork(self) -> None:
        """Beams from one row."""
        for row in self.pick(self.idle_rows(), 1):
            count = int(self.rng.integers(1, 3))
            if count <= self.manager.num_free_rows:
                self._try(lambda row=row, count=count: self._forked(row, self.manager.fork(row, count)))

    def _forked(self, row: int, children: list[int]) -> None:
        for child in children:
            self.running[child] = self.running[row].copy()
            self.done["forked"] += 1

    def reorder(self) -> None:
        """Beams change places: any mapping."""
        rows = self.pick(self.idle_rows(), 4)
        sources = [int(row) for row in self.rng.choice(rows, size=len(rows))] if rows else []

        def call() -> None:
            self.manager.reorder(rows, sources)
            stories = [self.running[source].copy() for source in sources]
            self.running.update(zip(rows, stories, strict=True))

        self._try(call)

    def _try(self, call: Callable[[], None]) -> None:
        """A verb that may find no room."""
        try:
            call()
        except OutOfBlocks:
            self.done["out of blocks"] += 1

    def preempt(self) -> None:
        """A row gives its blocks up."""
        for row in self.pick(self.running, 1):
            self._pause(row)

    def _pause(self, row: int) -> None:
        story = self.running.pop(row)
        state = self.manager.preempt(row, to_host=bool(self.rng.random() < 0.6))
        self.done[state.name] += 1
        if state == RowState.PREEMPTED:
            story.computed, story.has_source = 0, False
        self.paused[row] = story

    def resume(self) -> None:
        """A paused row comes back, or stays paused."""
        for row in self.pick(self.paused, 1):
            story = self.paused[row]
            answer = self.manager.resume(row, story.tokens)
            if answer.row is None:
                assert self.running or self.flights or len(pending(self.manager)), "it hangs"
                continue
            self.running[row] = self.paused.pop(row)
            story.computed = answer.num_hit_tokens
            story.num_prompt = max(story.num_prompt, len(story.tokens))
            self.done["resumed"] += 1

    def finish(self) -> None:
        """A sequence ends, wherever it stands."""
        rows = [row for row in self.idle_rows() if self.running[row].computed > 5]
        for row in self.pick(rows if rows and self.rng.random() < 0.7 else {**self.running, **self.paused}, 1):
            story = {**self.running, **self.paused}[row]
            story.cut(max(int(self.manager.num_committed_tokens[row]), 1))
            self.ended = [*self.ended[-3:], story] if len(story.tokens) > 5 else self.ended
            self.manager.finish(row)
            self.running.pop(row, None)
            self.paused.pop(row, None)

    def move(self) -> None:
        """A sequence goes to a free row."""
        free = np.flatnonzero(self.manager.row_states == RowState.FREE).tolist()
        for row in self.pick({**self.running, **self.paused}, 1) if free else []:
            target = int(self.rng.choice(free))
            self.manager.move_row(row, target)
            for stories in (self.running, self.paused):
                if row in stories:
                    stories[target] = stories.pop(row)

    def compact(self) -> None:
        """Blocks move together."""
        most = int(self.rng.integers(1, 12))
        moved = self.manager.compact(most)
        assert moved <= most
        self.done["moved"] += moved

    def copy(self) -> None:
        """The engine runs the copies asked for."""
        copies = self.manager.take_copies()
        for name in ("moves", "within", "to_host", "from_host"):
            self.done[name] += len(getattr(copies, name))
        self.content.run(copies)

    def evict(self) -> None:
        """Something else wants memory."""
        if self.manager.index is not None and self.rng.random() < 0.3:
            group = int(self.rng.integers(len(self.plan.groups)))
            self.manager.index.evict(group, int(self.rng.integers(1, 6)))

    # Looking

    def look(self) -> None:
        """Everything agrees, and everything contains what it should once the copies that wait have been made."""
        manager = self.manager
        manager.check()
        content, waiting = self.content, pending(manager)
        if len(waiting):
            content = content.copy()
            content.run(waiting)
        for row, story in self.running.items():
            content.check_row(manager, row, story)
        self._look_at_host(waiting)
        content.check_index(manager)
        assert not shared_writable(manager, list(self.running)), "two rows may write to one block"
        for group, table in enumerate(manager.tables):
            assert manager.peak_blocks_per_row[group] <= table.width

    def _look_at_host(self, waiting: BlockCopies) -> None:
        """The host's memory holds the rows that went there, and what is still to be copied."""
        pool, swaps = self.manager._store.host_pool, self.manager._swaps
        if pool is not None:
            pool.check()
            rows = [row for row in self.paused if self.manager.row_states[row] == RowState.SWAPPED]
            assert sorted(swaps._rows) == sorted(rows)
            held = sum(int(swaps.needs(row).sum()) for row in rows) + len(waiting.to_host) + len(waiting.from_host)
            assert pool.holders.sum() == held


def recut(plan: CachePlan, num_usable_slabs: int, blocks_per_slab: Sequence[int], num_parts: int = 1) -> CachePlan:
    """The plan with slabs cut into other numbers of blocks, states into other numbers of parts."""
    groups = [
        replace(
            group,
            blocks_per_slab=count,
            num_blocks=count * (num_usable_slabs + 1),
            num_parts=num_parts if group.group.is_state else group.num_parts,
            table_width=num_parts if group.group.is_state else group.table_width,
        )
        for group, count in zip(plan.groups, blocks_per_slab, strict=True)
    ]
    return replace(plan, num_slabs=num_usable_slabs + 1, groups=tuple(groups))
