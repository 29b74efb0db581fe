"""The step loop: schedule, prepare, commit tables, map slots, forward, sample."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from hybridkv._torch import torch
from hybridkv.arena import Arena, ArenaLayout
from hybridkv.attention import AttentionBackend, GroupBatch, TorchBackend, TritonBackend
from hybridkv.errors import InvalidRequest
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.planner import plan_cache
from hybridkv.runner.caches import LayerCaches
from hybridkv.runner.model import HostedModel
from hybridkv.runner.sampler import Sampler
from hybridkv.runner.scheduler import ScheduledBatch, Scheduler
from hybridkv.runner.sequence import Completion, SamplingParams, Sequence
from hybridkv.runner.text import TextStream, Tokenizer
from hybridkv.specs import ModelSpec

DEFAULT_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the cache and of a step.

    Attributes:
        memory_bytes: bytes of the cache arena.
        block_size: tokens a block, in every attention group.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of the longest sequence; the model's own by default.
        preempt_every: preempt the youngest sequence every so many steps, for tests; 0 never.
        layout: how the arena is laid out.
    """

    memory_bytes: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    preempt_every: int = 0
    layout: ArenaLayout = "slab"


@dataclass(frozen=True)
class GroupStats:
    """What one KV cache group holds now, held on average during a step, held at most."""

    lifecycle: str
    num_layers: int
    block_size: int
    num_blocks: int
    block_bytes: int
    held_blocks: int
    mean_held_blocks: float
    peak_blocks: int
    peak_blocks_per_row: int
    num_blocks_freed_out_of_window: int


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    `seconds` are wall time inside steps, `table_seconds` the part spent on the batch's geometry, the commit of the
    tables, the slot mapping and the attention metadata.
    """

    num_steps: int
    num_preemptions: int
    num_generated_tokens: int
    seconds: float
    table_seconds: float
    groups: tuple[GroupStats, ...]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Generates with a Hugging Face model whose cache hybridkv manages.

    Raises (on construction): UnsupportedModel if the model cannot be driven, SpecError if the memory is too small.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        limits = BatchLimits(
            max_num_seqs=config.max_num_seqs,
            max_model_len=_max_model_len(config, spec),
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.plan = plan_cache(spec, config.memory_bytes, limits, block_size=config.block_size)
        if backend is None:
            backend = TritonBackend() if self.device.type == "cuda" else TorchBackend()
        self.arena = Arena(self.plan, device=self.device, layout=config.layout, kv_layout=backend.kv_layout)
        self.manager = CacheManager(self.plan)
        self.tables = MultiGroupBlockTable.from_plan(self.plan, device=self.device, tables=self.manager.tables)
        self.model = HostedModel(model, LayerCaches(self.plan, self.arena, backend), limits.max_model_len)
        self.scheduler = Scheduler(self.manager, config.preempt_every)
        self.sampler = Sampler(self.device)
        self.tokenizer = tokenizer
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._streams: dict[int, TextStream] = {}
        self._on_text: Callable[[int, str], None] | None = None
        self._num_steps = self._num_generated = 0
        self._seconds = self._table_seconds = 0.0
        self._held_sum = np.zeros(len(self.plan.groups), dtype=np.int64)

    def generate(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams],
        on_text: Callable[[int, str], None] | None = None,
        on_step: Callable[[EngineStats], None] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts together; every request is checked before anything runs.

        Args:
            prompts: token ids of each prompt.
            params: for all prompts, or one for each.
            on_text: called with the prompt's index and each piece of text as it becomes certain.
            on_step: called with the counters after each step.

        Raises: InvalidRequest or NeverFits for a prompt that can never be served; nothing has run then.
        """
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"params: got {len(per_prompt)} for {len(prompts)} prompts, expected one for each")
        sequences = [
            self._new_sequence(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, per_prompt, strict=True))
        ]
        self._on_text = on_text
        for sequence in sequences:
            self.scheduler.add(sequence)
            if self.tokenizer is not None:
                self._streams[sequence.request_idx] = TextStream(self.tokenizer, sequence.params.stop)
        try:
            while self.scheduler.has_work:
                self.step()
                if on_step is not None:
                    on_step(self.stats)
            return [self._completion(sequence) for sequence in sequences]
        finally:
            self._abandon()

    def step(self) -> None:
        """Compute one batch and hand its new tokens to their sequences; without work, do nothing.

        It may be called again after the model failed: all running sequences are preempted then, so they start over.
        """
        if not self.scheduler.has_work:
            return
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        self._held_sum += self.manager.pool.num_held
        tables_started = time.perf_counter()
        input_ids, sampled = self._prepare(batch)
        computed = self.manager.num_computed_tokens[batch.rows]
        step = self.tables.step(batch.rows, batch.num_scheduled_tokens, computed)
        prompts = [sequence.num_prompt_tokens for sequence in batch.sequences]
        attention = self.model.begin(self._group_batches(step), prompts)
        forward_started = time.perf_counter()
        try:
            logits = self.model.forward(input_ids, step.geometry, attention, sampled)
            self.manager.commit(batch.rows, batch.num_scheduled_tokens)
            self._settle(batch, self.sampler.sample(logits, [batch.sequences[i] for i in sampled]), sampled)
        except BaseException:
            # States are advanced in place: the next step must not advance them over the same tokens again.
            self.scheduler.preempt_all()
            raise
        self._num_steps += 1
        self._table_seconds += forward_started - tables_started
        self._seconds += time.perf_counter() - started

    @property
    def stats(self) -> EngineStats:
        """The counters so far."""
        pool, manager = self.manager.pool, self.manager
        groups = tuple(
            GroupStats(
                lifecycle=group.group.lifecycle.kind,
                num_layers=group.group.num_layers,
                block_size=group.block_size,
                num_blocks=group.num_blocks - group.blocks_per_slab,
                block_bytes=group.block_stride_bytes,
                held_blocks=int(pool.num_held[g]),
                mean_held_blocks=float(self._held_sum[g] / max(1, self._num_steps)),
                peak_blocks=int(pool.peak_held[g]),
                peak_blocks_per_row=int(manager.peak_blocks_per_row[g]),
                num_blocks_freed_out_of_window=int(manager.num_freed_out_of_window[g]),
            )
            for g, group in enumerate(self.plan.groups)
        )
        return EngineStats(
            self._num_steps, manager.num_preemptions, self._num_generated, self._seconds, self._table_seconds, groups
        )

    def _new_sequence(self, request_idx: int, prompt: Seq[int], params: SamplingParams) -> Sequence:
        sequence = Sequence.create(request_idx, prompt, params, self.plan.limits.max_model_len)
        if max(prompt) >= self._vocab_size:
            raise InvalidRequest(
                f"prompt {request_idx}: got token id {max(prompt)}, the vocabulary has {self._vocab_size} tokens"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop: got {params.stop!r}, but the checkpoint has no tokenizer; use stop_token_ids")
        self.manager.check_fits(len(sequence.tokens))
        return sequence

    def _prepare(self, batch: ScheduledBatch) -> tuple[torch.Tensor, list[int]]:
        """Flatten the batch: its input ids `[T]` and the batch positions that sample a token."""
        chunks, sampled = [], []
        for position, (sequence, num_new) in enumerate(zip(batch.sequences, batch.num_scheduled_tokens, strict=True)):
            end = sequence.num_computed_tokens + num_new
            chunks.append(sequence.tokens[sequence.num_computed_tokens : end])
            if end == sequence.num_tokens:
                sampled.append(position)
        return torch.from_numpy(np.concatenate(chunks)).to(self.device), sampled

    def _group_batches(self, step: TableStep) -> list[GroupBatch]:
        return [
            GroupBatch(
                lifecycle=group.group.lifecycle,
                block_size=group.block_size,
                geometry=step.geometry,
                block_table=self.tables.block_table(g),
                block_table_cpu=self.tables.block_table_cpu(g),
                slot_mapping=step.slot_mapping[g],
                state_slots=step.state_slots(g) if group.group.is_state else None,
            )
            for g, group in enumerate(self.plan.groups)
        ]

    def _settle(self, batch: ScheduledBatch, token_ids: list[int], sampled: list[int]) -> None:
        for sequence, num_new in zip(batch.sequences, batch.num_scheduled_tokens, strict=True):
            sequence.num_computed_tokens += num_new
        for position, token_id in zip(sampled, token_ids, strict=True):
            sequence = batch.sequences[position]
            sequence.append(token_id)
            self._num_generated += 1
            stream = self._streams.get(sequence.request_idx)
            piece = stream.push(token_id) if stream is not None else ""
            if token_id in sequence.params.stop_token_ids or (stream is not None and stream.stopped):
                sequence.finish_reason = "stop"
            elif sequence.num_tokens == len(sequence.tokens):
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                piece += stream.finish() if stream is not None else ""
                self.scheduler.finish(sequence)
                self.sampler.forget(sequence)
            if piece and self._on_text is not None:
                self._on_text(sequence.request_idx, piece)

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None  # the loop ended, so every sequence finished
        stream = self._streams.get(sequence.request_idx)
        return Completion(
            token_ids=sequence.new_token_ids,
            text=stream.text if stream is not None else None,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=sequence.finish_reason,
        )

    def _abandon(self) -> None:
        """Leave nothing behind: an interrupted run frees its rows, so the engine can be used again."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.row is not None:
                self.manager.finish(sequence.row)
            self.sampler.forget(sequence)
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._streams.clear()


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    own = spec.max_model_len
    wanted = config.max_model_len
    if wanted is not None and own is not None and wanted > own:
        raise InvalidRequest(f"max_model_len: got {wanted}, the model was made for at most {own}")
    return next(length for length in (wanted, own, DEFAULT_MAX_MODEL_LEN) if length is not None)
