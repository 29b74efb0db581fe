"""One forward pass of a model over the cache: block copies, tables, slots, model."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.arena import Arena, HostArena
from hybridkv.attention import GroupBatch
from hybridkv.copy_list import BlockCopies
from hybridkv.manager import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.runner.model import HostedModel

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class PassInput:
    """What one forward pass computes.

    Shapes:
        rows               [n] rows of the tables, which have blocks for their new tokens
        num_new_tokens     [n] each row's new tokens
        token_ids          [T] int64, their ids, row after row
        num_prompt_tokens  [n] tokens of each row's prompt; those behind it were generated
        logits_at          [m] which of the T tokens' logits are wanted
    """

    rows: Sequence[int]
    num_new_tokens: Sequence[int]
    token_ids: Int64
    num_prompt_tokens: Sequence[int]
    logits_at: Sequence[int]


class ForwardPasses:
    """Runs forward passes, one after the other.

    Attributes:
        num_computed_tokens: tokens that passes computed.
        table_seconds: wall time before models run.
    """

    def __init__(
        self,
        manager: CacheManager,
        tables: MultiGroupBlockTable,
        arena: Arena,
        host: HostArena | None,
        model: HostedModel,
    ) -> None:
        self._manager, self._tables, self._arena, self._host, self._model = manager, tables, arena, host, model
        self._step: int | None = None
        self._copies: deque[BlockCopies] = deque()
        self.num_computed_tokens = 0
        self.table_seconds = 0.0

    def run(self, batch: PassInput) -> torch.Tensor:
        """Compute new tokens of rows; what they computed is unsettled until `settle`.

        Shapes: returns the logits `[m, vocab_size]`
        """
        started = time.perf_counter()
        rows = list(batch.rows)
        self._run_copies()
        input_ids = torch.from_numpy(batch.token_ids).to(self._arena.device)
        computed = self._manager.num_computed_tokens[rows]
        self._step = self._manager.launch(rows, batch.num_new_tokens)
        step = self._tables.step(rows, batch.num_new_tokens, computed)
        attention = self._model.begin(self.group_batches(step), batch.num_prompt_tokens)
        self.table_seconds += time.perf_counter() - started
        logits = self._model.forward(input_ids, step.geometry, attention, batch.logits_at)
        self.num_computed_tokens += len(batch.token_ids)
        return logits

    def settle(self) -> None:
        """Take note that the last pass has ended, or has failed; drafts that it refused are rolled back before."""
        if self._step is not None:
            step, self._step = self._step, None
            self._manager.settle(step)

    def copy_only(self) -> None:
        """Run the copies that wait, where no row can go on before."""
        self._run_copies()
        self._manager.settle(self._manager.launch([], []))

    def _run_copies(self) -> None:
        """Run what was asked for, after copies that failed or were interrupted before: others rely on them."""
        copies = self._manager.take_copies()
        if len(copies):
            self._copies += [
                BlockCopies(moves=copies.moves),
                BlockCopies(from_host=copies.from_host),
                BlockCopies(within=copies.within),
                BlockCopies(to_host=copies.to_host),
            ]
        while self._copies:
            self._arena.run_copies(self._copies[0], self._host)
            self._copies.popleft()

    def group_batches(self, step: TableStep) -> list[GroupBatch]:
        """Return what each group's layers need of a step."""
        return [
            GroupBatch(
                lifecycle=group.group.lifecycle,
                block_size=group.block_size,
                geometry=step.geometry,
                block_table=self._tables.block_table(g),
                block_table_cpu=self._tables.block_table_cpu(g),
                slot_mapping=step.slot_mapping[g],
                state_slots=step.state_slots(g) if group.group.is_state else None,
            )
            for g, group in enumerate(self._manager.plan.groups)
        ]
