"""The facade over pool, tables and prefix index: sequences come, grow, branch, pause, go.

    admit -> row          a sequence gets a row, with what the cache already has of its prompt
    reserve(rows, n)      blocks for the next n tokens, per row OK / LATER / NEVER
    launch -> step        n tokens are being computed; settle(step) once their kernels have finished
    commit(rows, n, ids)  n tokens are final: full blocks may be shared
    fork, reorder         sequences that share what they have in common
    roll_back             tokens that were computed in vain are taken back
    preempt -> resume     all blocks given up, the row kept; copied to the host, or computed again
    finish                row and blocks are free again, what may serve others stays cached

Engines that wait for each step need `reserve` and `commit` alone, which does what `launch` and `settle` do. State is
arrays over rows and groups: a verb over R rows and G groups is a fixed number of array operations, but for admissions,
branches and ends, which cost a fixed number a sequence. A verb that fails leaves everything as it was.

The manager moves no bytes: the copies that verbs need wait in `take_copies` for the engine, which runs them before the
next forward pass.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.admission import Admission, Reservation, Verdict
from hybridkv.admitting import Identity, admit, check_fits, token_ids_of
from hybridkv.branching import branch, check_can_branch
from hybridkv.compaction import DEFAULT_MAX_MOVES, compact, compact_for
from hybridkv.copy_list import BlockCopies
from hybridkv.errors import InvalidRequest, NeverFits
from hybridkv.manager_core import ManagerCore, ManagerOptions
from hybridkv.row_lengths import RowState
from hybridkv.units import RowId, int_array

__all__ = ["CacheManager", "ManagerOptions"]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class CacheManager(ManagerCore):
    """Rows, blocks, tables and cached prefixes of every group of a plan.

    Shapes of lengths by row, all [max_num_seqs] int64: `num_computed_tokens`, `num_settled_tokens`,
    `num_committed_tokens`, `capacity_tokens`.

    Attributes:
        pool: who holds which block.
        tables: one block table a group.
        index: what is cached of ended and running sequences; None without prefix caching.
        num_preemptions: rows that were preempted so far.
    """

    # Coming

    def check_fits(self, num_tokens: int) -> None:
        """Check that one sequence of `num_tokens` tokens fits when it has the pool to itself.

        Raises: InvalidRequest if it is longer than `max_model_len`, NeverFits if it does not fit.
        """
        check_fits(self._store, num_tokens)

    def admit(
        self,
        tokens: ArrayLike | int,
        max_total_tokens: int | None = None,
        *,
        external_tokens: int = 0,
        salt: Hashable = None,
        features: Sequence[tuple[int, Hashable]] = (),
    ) -> Admission:
        """Give a sequence a row that begins with the longest prefix of its prompt that all groups have cached.

        At least one token is left to compute. Blocks for it come with `reserve`; that the whole prompt fits beside
        what runs now is checked here, `max_total_tokens` (the prompt's length by default) against the whole memory.

        Args:
            tokens: the prompt's token ids, [n] integers; its length alone if nothing is to be cached.
            external_tokens: so many tokens from the front are computed elsewhere: blocks are lent for those that are
                not cached here, and `commit` says when they have arrived.
            salt: anything hashable that all of the sequence depends on, such as a tenant or an adapter.
            features: (position, anything hashable) for what stands behind placeholder tokens, such as an image's hash.

        Returns: OK with a row, LATER with what is missing now, NEVER if it does not fit even alone.
        Raises: InvalidRequest for an empty prompt, ids that are not integers, a length above `max_model_len`.
        """
        ids, num_prompt = self._prompt(tokens)
        total = num_prompt if max_total_tokens is None else max_total_tokens
        refusal = self._refusal(num_prompt, total, external_tokens)
        if refusal is not None:
            return refusal
        free = self._store.rows.free_rows()
        identity = Identity(salt, tuple(features))
        if not len(free):
            reason = f"all {len(self._store.rows)} rows are taken; wait for a sequence to end"
            return Admission(Verdict.LATER, None, 0, (0,) * self._store.num_groups, reason)
        admission = admit(self._store, int(free[0]), num_prompt, ids, external_tokens, identity)
        if admission.row is not None:
            self._identities[admission.row] = identity
            self._counts.note_admission(num_prompt, admission.num_hit_tokens)
        return admission

    # Growing

    def reserve(self, rows: ArrayLike, num_new_tokens: ArrayLike) -> Reservation:
        """Reserve blocks so that each row can compute `num_new_tokens` more tokens.

        Rows are served in the order given; from the first row that does not fit on, none gets anything. What is
        cached and held by nobody is evicted where that helps.

        Shapes: rows [n] distinct running rows; num_new_tokens [n], from 1 to the limits' `max_in_flight` each
        Raises: ValueError for rows or counts that are not of this form, or that pass a row's `chunk_limits`;
            InvalidRequest for a row that would grow past `max_model_len`; nothing changes then.
        """
        return self._growth.reserve(*self._store.rows.running_with(rows, num_new_tokens))

    def chunk_limits(self, rows: ArrayLike) -> Int64:
        """Return `[n]`: the most tokens each running row may compute in its next step, so that a state can be kept
        where a resume point is wanted; a large number where nothing stops it.

        Raises: ValueError for rows that are not running ones.
        """
        return self._growth.chunk_limits(self._store.rows.running(rows))

    def launch(self, rows: ArrayLike, num_new_tokens: ArrayLike) -> int:
        """Take note that kernels for `num_new_tokens` tokens of each row are launched; return the step's number.

        Blocks that are given up from now on go to nobody until `settle`.

        Raises: ValueError if a row would pass its capacity; nothing changes then.
        """
        return self._growth.launch(*self._store.rows.running_with(rows, num_new_tokens))

    def settle(self, step: int) -> None:
        """Take note that the kernels of a step, and of all before it, have finished and that their results are known.

        Drafts that were not accepted are to be rolled back before. Blocks that no later query can see are freed, and
        all that was given up while the steps were in flight.

        Raises: ValueError for a step that was not launched or has settled; nothing changes then.
        """
        self._growth.settle(step)

    def commit(self, rows: ArrayLike, num_new_tokens: ArrayLike, token_ids: ArrayLike | None = None) -> None:
        """Make tokens final: their full blocks may be shared from now on.

        Of a row without steps in flight the tokens count as computed and settled too.

        Shapes: rows [n] distinct running rows; num_new_tokens [n]; token_ids [sum(num_new_tokens)], those tokens' ids
            row after row; without them the rows are not cached any further
        Raises: ValueError if a row would pass its capacity or, with steps in flight, its settled tokens, or for token
            ids of another form; nothing changes then.
        """
        row_ids, num_new = self._store.rows.running_with(rows, num_new_tokens)
        ids = None if token_ids is None else token_ids_of(token_ids, int(num_new.sum()))
        self._growth.commit(row_ids, num_new, ids)

    # Branching

    def fork(self, row: int, num_children: int) -> list[RowId]:
        """Let new rows go on where a row is; full blocks are shared, last parts of blocks and states copied.

        Raises: ValueError if the row does not run, InvalidRequest if some of its tokens are not committed, OutOfRows,
            OutOfBlocks; nothing changes then.
        """
        if num_children < 1:
            raise InvalidRequest(f"num_children: got {num_children}, expected at least 1")
        sources = self._store.rows.running([row]).repeat(num_children)
        check_can_branch(self._store, sources[:1])
        targets = self._store.take_rows(num_children)
        branch(self._store, targets, sources)
        self._identities |= dict.fromkeys(targets.tolist(), self._identities[row])
        return [RowId(target) for target in targets.tolist()]

    def reorder(self, rows: ArrayLike, sources: ArrayLike) -> None:
        """Let row `rows[i]` go on where row `sources[i]` was, as beam search does; only last parts and states of
        sources with several heirs are copied.

        Shapes: rows [n] distinct running rows; sources [n], some of them, repeated as often as wanted
        Raises: ValueError for rows of another form, InvalidRequest if some tokens are not committed, OutOfBlocks;
            nothing changes then.
        """
        row_ids, source_ids = self._store.rows.running(rows), int_array("sources", sources)
        if len(row_ids) != len(source_ids) or not np.isin(source_ids, row_ids).all():
            raise ValueError(f"sources: got {source_ids.tolist()}, expected one of the rows for each of {len(row_ids)}")
        check_can_branch(self._store, row_ids)
        identities = [self._identities[source] for source in source_ids.tolist()]
        moved = row_ids != source_ids
        branch(self._store, row_ids[moved], source_ids[moved])
        for row, identity in zip(row_ids.tolist(), identities, strict=True):
            self._drafts.forget(row)
            self._identities[row] = identity

    # Taking back

    def checkpoint(self, rows: ArrayLike) -> None:
        """Keep the states of rows as they are, before drafts that may have to be rolled back; without states, nothing.

        Raises: ValueError for rows that are not running ones, OutOfBlocks; nothing changes then.
        """
        self._drafts.checkpoint(self._store.rows.running(rows))

    def can_roll_back(self, rows: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.bool_]:
        """Return `[n]`: whether each row's last `num_tokens[i]` computed tokens can be taken back.

        They must not have settled, and a row with states needs a `checkpoint` from before them.
        """
        return self._drafts.can_roll_back(*self._rows_and_counts(rows, num_tokens))

    def roll_back(self, rows: ArrayLike, num_tokens: ArrayLike) -> Int64:
        """Take back each row's last `num_tokens[i]` computed tokens; blocks stay reserved.

        Returns: `[n]`, the computed tokens then. A row with states goes back to its checkpoint, so accepted tokens
            behind it are to be computed again.
        Raises: ValueError if `can_roll_back` says no for a row; nothing changes then.
        """
        row_ids, counts = self._rows_and_counts(rows, num_tokens)
        possible = self._drafts.can_roll_back(row_ids, counts)
        if not possible.all():
            row = int(row_ids[~possible][0])
            raise ValueError(
                f"row {row}: got {counts[~possible][0]} tokens to roll back, {self.num_computed_tokens[row]} are "
                f"computed and {self.num_settled_tokens[row]} settled; roll back before `settle`, with states after "
                "`checkpoint`"
            )
        self._drafts.roll_back(row_ids, counts)
        self._growth.take_back(row_ids)
        return self.num_computed_tokens[row_ids]

    # Pausing and going

    def preempt(self, row: int, *, to_host: bool = False, keep: bool = True) -> RowState:
        """Give up all blocks of a running row; the row stays taken until `resume` or `finish`.

        Args:
            keep: keep the row's end for itself and others; not after a step that failed, which may have advanced its
                states already.

        Returns: SWAPPED if its content was to go to the host and fits there, PREEMPTED if it is to be computed again,
            as far as it is no longer cached then.
        Raises: ValueError if the row is not running.
        """
        store = self._store
        store.rows.check_state(row, RowState.RUNNING)
        computed = int(self.num_computed_tokens[row])
        is_final = computed == self.num_committed_tokens[row]
        swapped = to_host and keep and is_final and computed > 0 and self._swaps.swap_out(row)
        self._leave(row, is_tracked=swapped, keep=keep)
        store.rows.end(row, RowState.SWAPPED if swapped else RowState.PREEMPTED)
        self.num_preemptions += 1
        self._counts.note_preemption(swapped)
        return RowState(int(self.row_states[row]))

    def resume(self, row: int, tokens: ArrayLike | int) -> Admission:
        """Let a preempted row run again, with what it had on the host or what is still cached of `tokens`.

        The row is replaced; unless the verdict is OK it stays preempted.

        Args:
            tokens: all tokens the sequence has by now, as for `admit`.

        Raises: ValueError if the row is not preempted, and as `admit`; the row stays preempted then.
        """
        store = self._store
        store.rows.check_state(row, RowState.PREEMPTED, RowState.SWAPPED)
        ids, num_tokens = self._prompt(tokens)
        refusal = self._refusal(num_tokens, num_tokens, 0)
        if refusal is not None:
            return refusal
        if self.row_states[row] == RowState.PREEMPTED:
            admission = admit(store, row, num_tokens, ids, 0, self._identities[row])
            if admission.row is not None:
                self._counts.note_return(was_swapped=False)
            return admission
        on_host = self._swaps.num_tokens(row)
        if num_tokens < on_host:
            raise InvalidRequest(f"tokens: got {num_tokens} for row {row}, of which {on_host} are on the host")
        need = self._swaps.needs(row)
        if not store.lender.fits(need):
            compact_for(store, need)
        if store.copies.awaits_host or not store.lender.fits(need):
            missing = store.lender.shortfall(need)
            return Admission(
                Verdict.LATER, None, 0, tuple(missing.tolist()), "waits for blocks or for its way to the host"
            )
        num_hit = self._swaps.swap_in(row)
        store.rows.start(row, num_hit)
        self._counts.note_return(was_swapped=True)
        return Admission(
            Verdict.OK, RowId(row), num_hit, (0,) * store.num_groups, f"{num_hit} tokens come from the host"
        )

    def finish(self, row: int) -> None:
        """Free a row and its blocks; what other sequences may begin with stays cached.

        Raises: ValueError if the row is free already.
        """
        if not 0 <= row < len(self.row_states) or self.row_states[row] in (RowState.FREE, RowState.DRAINING):
            raise ValueError(f"row: got {row}, which holds no sequence")
        if self.row_states[row] == RowState.RUNNING:
            self._leave(row, is_tracked=False)
        elif self._store.recorder is not None:
            self._store.recorder.stop(row)
        self._swaps.forget(row)
        del self._identities[row]
        self._store.end(row)

    def move_row(self, source: int, target: int) -> None:
        """Move a sequence to a free row, as engines do that keep their rows dense; the source row is free afterwards.

        Raises: ValueError if the source holds no sequence or the target holds one.
        """
        taken = RowState.RUNNING, RowState.PREEMPTED, RowState.SWAPPED
        for name, row, states in (("source", source, taken), ("target", target, (RowState.FREE,))):
            if not 0 <= row < len(self.row_states) or self.row_states[row] not in states:
                wanted = "with" if states is taken else "without"
                raise ValueError(f"{name}: got row {row}, expected one {wanted} a sequence")
        generation = int(self._store.rows.generation[source])
        self._store.move(source, target)
        self._growth.move(source, target, generation)
        self._drafts.move(source, target)
        self._swaps.move(source, target)
        self._identities[target] = self._identities.pop(source)

    # Copies

    def compact(self, max_moves: int = DEFAULT_MAX_MOVES) -> int:
        """Move at most so many blocks together within their groups, so that whole slabs become free; for idle times.

        Returns: the blocks moved; `take_copies` has the copies.
        """
        return compact(self._store, max_moves)

    def take_copies(self) -> BlockCopies:
        """Return the copies that verbs asked for since the last call; run them before the next forward pass.

        Take them even where nothing runs: until then nobody else gets their blocks.
        """
        return self._store.copies.take()

    # Seeing

    def _leave(self, row: int, *, is_tracked: bool, keep: bool = True) -> None:
        """Take a running row's blocks, after keeping what others may go on from."""
        store = self._store
        if keep and store.recorder is not None and self.num_computed_tokens[row] == self.num_committed_tokens[row]:
            store.recorder.retire(row, int(self.num_committed_tokens[row]))
        self._drafts.forget(row)
        store.release(row, is_tracked=is_tracked)

    def _rows_and_counts(self, rows: ArrayLike, counts: ArrayLike) -> tuple[Int64, Int64]:
        row_ids, num_tokens = self._store.rows.running(rows), int_array("num_tokens", counts)
        if row_ids.shape != num_tokens.shape or (num_tokens < 0).any():
            raise ValueError(f"num_tokens: got {num_tokens.tolist()}, expected one of at least 0 for each row")
        return row_ids, num_tokens

    def _refusal(self, num_prompt: int, total: int, external_tokens: int) -> Admission | None:
        """Return NEVER for a sequence that does not fit even alone, None for one that does."""
        if num_prompt < 1 or total < num_prompt or external_tokens < 0:
            raise InvalidRequest(
                f"tokens: got a prompt of {num_prompt}, a total of {total} and {external_tokens} external ones, "
                "expected 1 <= prompt <= total and no negative number"
            )
        try:
            check_fits(self._store, total)
        except NeverFits as error:
            missing = tuple(error.shortfall.get(group, 0) for group in range(self._store.num_groups))
            return Admission(Verdict.NEVER, None, 0, missing, str(error))
        return None

    def _prompt(self, tokens: ArrayLike | int) -> tuple[Int32 | None, int]:
        if isinstance(tokens, int | np.integer):
            return None, int(tokens)
        ids = token_ids_of(tokens, None)
        return ids, len(ids)
