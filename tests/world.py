"""A small engine over real cache memory in which every byte says whose it is.

`World` runs requests that often share prefixes through every verb of a `CacheManager`. It writes a stamp of the content
for every token and every state it computes, through the same slots and views that a model's kernels use, then reads
every live token of every request back. A stamp of other content is corruption.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from hybridkv import BatchLimits, CacheManager, OutOfBlocks, Verdict
from hybridkv.manager import ManagerOptions
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.row_lengths import RowState
from tests.world_check import check_manager, check_tables, read_back
from tests.world_content import Content, Library
from tests.world_memory import StampedMemory, Written, world_plan
from tests.world_requests import Entry, Flight, Request, WorldConfig

MAX_MODEL_LEN, MAX_BATCHED_TOKENS, MAX_GROWTH, MAX_STEPS_IN_FLIGHT = 60, 32, 12, 2


class World:
    """Requests that share, grow, branch, draft, pause, go and come back."""

    def __init__(self, config: WorldConfig, seed: int = 0) -> None:
        self.config, self.rng = config, np.random.default_rng(seed)
        unsettled = MAX_GROWTH * (MAX_STEPS_IN_FLIGHT - 1) if config.is_async else 0
        limits = BatchLimits(6, MAX_MODEL_LEN, MAX_BATCHED_TOKENS, unsettled)
        self.plan = world_plan(config.lifecycles, config.block_sizes, config.num_slabs, limits)
        self.longest = self.plan.longest_sequence()
        host_bytes = config.host_slabs * self.plan.slab_bytes
        self.memory = StampedMemory(self.plan, config.layout, host_bytes, config.copy)
        options = ManagerOptions(
            prefix_caching=config.prefix_caching,
            resume_points=config.policy,
            watermark=config.watermark,
            host_bytes=host_bytes,
        )
        self.manager = CacheManager(self.plan, options=options)
        self.tables = MultiGroupBlockTable.from_plan(self.plan, tables=self.manager.tables)
        self.library = Library(self.rng, MAX_MODEL_LEN)
        self.requests: list[Request] = []
        self.num_requests = self.num_steps = 0
        self.flights: deque[Flight] = deque()
        self.counts: Counter[str] = Counter()
        self._has_states = any(group.group.is_state for group in self.plan.groups)
        self._copies_wait = False

    def of_state(self, *states: RowState) -> list[Request]:
        """Return the requests in one of some states."""
        return [request for request in self.requests if request.state in states]

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks."""
        return self.of_state(RowState.RUNNING)

    def act(self, verb: str) -> None:
        """Do one verb with a random choice of requests, then check everything; some find nothing to act on."""
        self.num_steps += 1
        self.counts[verb] += 1
        getattr(self, verb)()
        if self._copies_wait and self.rng.random() >= self.config.defer:
            self._run_copies()
        self.check()

    # Verbs

    def admit(self) -> None:
        """Bring a new request."""
        has_ids = self.rng.random() < 0.95
        content = (self.library.prompt if has_ids else self.library.unique_prompt)(self.longest)
        external = int(self.rng.integers(1, MAX_BATCHED_TOKENS)) if self.rng.random() < 0.1 else 0
        tokens = content.tokens.copy() if has_ids else len(content)
        admission = self.manager.admit(
            tokens, self.longest, external_tokens=external, salt=content.salt, features=content.features
        )
        if admission.row is None:
            assert admission.verdict is Verdict.LATER, admission.reason
            self._expect_room_elsewhere(self.manager.num_free_rows == 0)
            return
        request = self._add(content, admission.row, has_ids)
        self._begin(request, admission.num_hit_tokens)
        num_external = min(external, len(content) - 1) - admission.num_hit_tokens
        if num_external > 0:
            self._run_copies()
            step = self.tables.step([request.row], [num_external], [request.computed])
            self._write(step, [request], [num_external], from_elsewhere=True)
            self._commit([request], [num_external])

    def grow(self) -> None:
        """Compute tokens of some requests in one step."""
        self._wait_for_room_in_flight()
        chosen = [request for request in self._shuffled(self.running) if self.rng.random() < 0.8]
        self._compute(chosen, self.rng.integers(1, MAX_GROWTH + 1, len(chosen)).tolist(), is_draft=False)

    def draft(self) -> None:
        """Compute drafts of some requests, most of them wrong in part."""
        self._wait_for_room_in_flight()
        ready = [
            r for r in self._decided(self._shuffled(self.running)) if r.computed and r.computed >= len(r.content) - 1
        ]
        chosen = [request for request in ready if self.rng.random() < 0.7]
        try:
            self.manager.checkpoint([request.row for request in chosen])
        except OutOfBlocks:
            return
        self._note_checkpoints(chosen)
        self._compute(chosen, self.rng.integers(2, 6, len(chosen)).tolist(), is_draft=True)

    def checkpoint(self) -> None:
        """Keep the states of a request as they are, for drafts to come or in vain."""
        for request in self._some(self._decided(self.running)):
            try:
                self.manager.checkpoint([request.row])
            except OutOfBlocks:
                return
            self._note_checkpoints([request])

    def settle(self) -> None:
        """End the oldest step in flight: its drafts are judged, what is left of it is final."""
        if not self.flights:
            return
        flight = self.flights[0]
        for entry in [entry for entry in flight.entries if entry.is_wrong]:
            self._roll_back(entry.request, entry.start + entry.num_accepted)
        self.flights.popleft()
        # What nobody waits for any more is written as late as can be.
        gone = [entry.request.number for entry in flight.entries if not entry.is_live]
        late = np.isin(flight.written.owners, gone)
        self.counts["late tokens"] += int(late.sum())
        self.memory.write(flight.written, late)
        self.manager.settle(flight.number)
        done = [entry for entry in flight.entries if entry.is_live and entry.count]
        for entry in done:
            entry.request.settled = entry.start + entry.count
        self._commit([entry.request for entry in done], [e.request.settled - e.request.committed for e in done])

    def fork(self) -> None:
        """Let new requests go on where one is."""
        for parent in self._some(self._final()):
            num_children = int(self.rng.integers(1, 3))
            if num_children > self.manager.num_free_rows:
                return
            try:
                rows = self.manager.fork(parent.row, num_children)
            except OutOfBlocks:
                return
            self._copies_wait = True
            for row in rows:
                child = self._add(parent.content.copy(), row, parent.has_ids)
                child.computed = child.settled = child.committed = parent.computed
                if self.rng.random() < 0.8:
                    child.content.truncate(max(child.computed, 1))

    def reorder(self) -> None:
        """Let beams change places."""
        beams = [request for request in self._final() if self.rng.random() < 0.7]
        if len(beams) < 2:
            return
        sources = self.rng.integers(0, len(beams), len(beams)).tolist()
        try:
            self.manager.reorder([beam.row for beam in beams], [beams[source].row for source in sources])
        except OutOfBlocks:
            return
        self._copies_wait = True
        for flight in self.flights:  # of them only what was taken back already
            flight.entries[:] = [entry for entry in flight.entries if entry.request not in beams]
        past = [(b.content, b.has_ids, b.computed) for b in beams]
        for i, (beam, source) in enumerate(zip(beams, sources, strict=True)):
            content, beam.has_ids, computed = past[source]
            beam.content = content if i == source else content.copy()
            beam.computed = beam.settled = beam.committed = computed
            beam.checkpoint = None

    def preempt(self) -> None:
        """Take a request's blocks away, to be computed again."""
        for request in self._some(self.running):
            assert self.manager.preempt(request.row) is RowState.PREEMPTED
            self._pause(request, RowState.PREEMPTED)

    def swap_out(self) -> None:
        """Take a request's blocks away, to the host if they fit there."""
        for request in self._some(self.running):
            is_final = request.committed == request.computed
            state = self.manager.preempt(request.row, to_host=True)
            assert state is not RowState.SWAPPED or is_final
            self._copies_wait |= state is RowState.SWAPPED
            self._pause(request, state)

    def resume(self) -> None:
        """Let a preempted request run again."""
        for request in self._some(self.of_state(RowState.PREEMPTED, RowState.SWAPPED)):
            tokens = request.content.tokens.copy() if request.has_ids else len(request.content)
            admission = self.manager.resume(request.row, tokens)
            if admission.row is None:
                self._expect_room_elsewhere(self._copies_wait)
                return
            assert request.state is RowState.PREEMPTED or admission.num_hit_tokens == request.committed
            from_host = request.state is RowState.SWAPPED
            request.state = RowState.RUNNING
            self._begin(request, admission.num_hit_tokens, from_host=from_host)

    def finish(self) -> None:
        """End a request, rather one that has come far; its tokens stay cached."""
        for request in sorted(self._shuffled(self.requests)[:3], key=lambda r: r.committed)[-1:]:
            self.manager.finish(request.row)
            self._end(request)

    def move(self) -> None:
        """Move a request to another row."""
        free = np.flatnonzero(self.manager.row_states == RowState.FREE)
        if len(free):
            for request in self._some(self.requests):
                target = int(self.rng.choice(free))
                self.manager.move_row(request.row, target)
                request.row = target

    def compact(self) -> None:
        """Move blocks together."""
        num_moves = self.manager.compact(int(self.rng.integers(1, 30)))
        self.counts["moved blocks"] += num_moves
        self._copies_wait |= num_moves > 0

    # One step

    def _compute(self, requests: Sequence[Request], amounts: Sequence[int], *, is_draft: bool) -> None:
        requests, amounts = self._within_limits(requests, amounts)
        if not requests:
            return
        reservation = self.manager.reserve([request.row for request in requests], amounts)
        assert Verdict.NEVER not in reservation.verdicts.tolist(), "a sequence that was admitted does not fit alone"
        if not reservation.num_ok:
            self._expect_room_elsewhere(len(self.running) > 1 or any(r.checkpoint is not None for r in requests))
            return
        requests, amounts = requests[: reservation.num_ok], amounts[: reservation.num_ok]
        entries = []
        for request, amount in zip(requests, amounts, strict=True):
            num_known = min(max(len(request.content) - request.computed, 0), amount)
            request.content.extend(self.library.draw(amount - num_known))
            num_accepted = int(self.rng.integers(num_known, amount + 1)) if is_draft else amount
            entries.append(Entry(request, request.epoch, request.computed, amount, num_accepted))
        self._run_copies()
        rows, before = [request.row for request in requests], [request.computed for request in requests]
        step = self.tables.step(rows, amounts, before, num_tokens_padded=MAX_BATCHED_TOKENS)
        written = self._write(step, requests, amounts)
        if not self.config.is_async and not is_draft and self.rng.random() < 0.5:
            self._commit(requests, amounts)
            return
        number = self.manager.launch(rows, amounts)
        self.flights.append(Flight(number, entries, written))
        for entry in entries:
            entry.request.computed += entry.count
        if not self.config.is_async:
            self.settle()

    def _within_limits(self, requests: Sequence[Request], amounts: Sequence[int]) -> tuple[list[Request], list[int]]:
        """Return who may compute how much in one step."""
        limits = self.manager.chunk_limits([request.row for request in requests])
        chosen, left = {}, MAX_BATCHED_TOKENS
        for request, amount, limit in zip(requests, amounts, limits.tolist(), strict=True):
            assert limit > 0 or request.computed > request.committed, "a row waits for nothing"
            num_unsettled = request.computed - request.settled
            most = min(limit, self.longest - request.computed, self.plan.limits.max_in_flight - num_unsettled, left)
            if min(amount, most) > 0:
                chosen[request] = min(amount, most)
                left -= chosen[request]
        return list(chosen), list(chosen.values())

    def _write(
        self, step: TableStep, requests: Sequence[Request], amounts: Sequence[int], *, from_elsewhere: bool = False
    ) -> Written:
        hashes = [r.content.hashes[r.computed : r.computed + n] for r, n in zip(requests, amounts, strict=True)]
        owners = np.repeat([request.number for request in requests], amounts)
        written = self.memory.written_by(step, owners, np.concatenate(hashes), from_elsewhere=from_elsewhere)
        self.memory.write(written)
        return written

    def _commit(self, requests: Sequence[Request], amounts: Sequence[int]) -> None:
        for has_ids in (True, False):
            chosen = [pair for pair in zip(requests, amounts, strict=True) if pair[0].has_ids is has_ids]
            if not chosen:
                continue
            tokens = [request.content.tokens[request.committed : request.committed + n] for request, n in chosen]
            rows, counts = [request.row for request, _ in chosen], [n for _, n in chosen]
            self.manager.commit(rows, counts, np.concatenate(tokens) if has_ids else None)
        for request, amount in zip(requests, amounts, strict=True):
            request.committed += amount
            request.settled = max(request.settled, request.committed)
            request.computed = max(request.computed, request.committed)

    def _roll_back(self, request: Request, target: int) -> None:
        """Take a request back to `target` tokens, or its checkpoint where it has states."""
        counts = [request.computed - target]
        assert self.manager.can_roll_back([request.row], counts).all()
        (at,) = self.manager.roll_back([request.row], counts).tolist()
        assert at == (request.checkpoint if self._has_states else target)
        self.counts["rolled back"] += request.computed - at
        request.computed, request.checkpoint = at, None
        request.content.truncate(target)
        for flight in self.flights:
            for entry in flight.entries:
                if entry.request is request and entry.is_live:
                    entry.cut(at)

    def _wait_for_room_in_flight(self) -> None:
        while len(self.flights) >= MAX_STEPS_IN_FLIGHT:
            self.settle()

    def _run_copies(self) -> None:
        copies = self.manager.take_copies()
        for name in ("moves", "from_host", "within", "to_host"):
            self.counts[name] += len(getattr(copies, name))
        self.memory.run(copies)
        self._copies_wait = False

    # Coming and going

    def _add(self, content: Content, row: int, has_ids: bool) -> Request:
        self.requests.append(Request(self.num_requests, content, row, has_ids))
        self.num_requests += 1
        return self.requests[-1]

    def _begin(self, request: Request, num_hit: int, *, from_host: bool = False) -> None:
        request.computed = request.settled = request.committed = num_hit
        self.counts["swapped in"] += from_host
        self.counts["hits"] += num_hit > 0 and not from_host
        self.counts["hits with a tail"] += num_hit % self.config.block_sizes[0] > 0 and not from_host
        self._copies_wait = True

    def _pause(self, request: Request, state: RowState) -> None:
        request.state = state
        request.epoch += 1
        request.checkpoint = None
        # Drafts go; a prompt stays whole, and what was sampled from settled steps is known.
        request.content.truncate(max(request.committed, min(request.num_prompt, len(request.content))))
        if state is RowState.SWAPPED:
            return
        request.computed = request.settled = request.committed = 0

    def _end(self, request: Request) -> None:
        self.requests.remove(request)
        request.epoch += 1
        request.content.truncate(request.committed)
        if request.has_ids and request.committed:
            self.library.end(request.content)

    def _expect_room_elsewhere(self, is_excused: bool) -> None:
        """Check that who has to wait waits for somebody; blocks may have moved to make room."""
        self._copies_wait = True
        if is_excused or self.flights or self.running:
            return
        # Nothing runs: an empty step ends what copies still touch.
        self._run_copies()
        self.manager.settle(self.manager.launch([], []))
        self.counts["waits for copies"] += 1

    def _shuffled(self, requests: Sequence[Request]) -> list[Request]:
        return [requests[i] for i in self.rng.permutation(len(requests)).tolist()]

    def _some(self, requests: Sequence[Request]) -> list[Request]:
        """Return one of some requests, none if there are none."""
        return self._shuffled(requests)[:1]

    def _final(self) -> list[Request]:
        """Return running requests of which everything is final."""
        return [request for request in self.running if request.committed == request.computed]

    def _decided(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests without drafts in flight."""
        drafts = {entry.request.number for flight in self.flights for entry in flight.entries if entry.is_wrong}
        return [request for request in requests if request.number not in drafts]

    def _note_checkpoints(self, requests: Sequence[Request]) -> None:
        self._copies_wait |= bool(requests)
        for request in requests:
            if self._has_states and request.computed:
                request.checkpoint = request.computed

    def check(self) -> None:
        """Check the accounting, the tables on both sides, every length and every live stamp of every request."""
        check_manager(self.manager, self.requests)
        check_tables(self.tables)
        self.memory.check_null()
        if not self._copies_wait:
            read_back(self.running, self.tables, self.memory)
