"""The step loop: schedule, forward, sample, commit, hand out."""

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hybridkv._torch import torch
from hybridkv.arena import Arena, HostArena
from hybridkv.attention import AttentionBackend, TorchBackend, TritonBackend
from hybridkv.errors import InvalidRequest, InvariantError
from hybridkv.manager import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.planner import plan_cache
from hybridkv.runner.beams import Beam, BeamParams, search_beams
from hybridkv.runner.caches import LayerCaches
from hybridkv.runner.config import EngineConfig
from hybridkv.runner.model import HostedModel
from hybridkv.runner.passes import ForwardPasses, PassInput
from hybridkv.runner.sampler import Sampler
from hybridkv.runner.scheduler import Propose, ScheduledBatch, Scheduler
from hybridkv.runner.sequence import Completion, SamplingParams, Sequence, StepOutput
from hybridkv.runner.stats import Counters, EngineStats
from hybridkv.runner.text import TextStream, Tokenizer
from hybridkv.specs import ModelSpec


class Engine:
    """Generates with a Hugging Face model whose cache hybridkv manages.

    `generate` takes all prompts at once; a server calls `add` as requests come, and `step` as long as there is work.

    Raises (on construction): UnsupportedModel if the model cannot be driven, SpecError if the memory is too small.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        backend: AttentionBackend | None = None,
        propose: Propose | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        limits = config.limits(spec)
        self.plan = plan_cache(spec, config.memory_bytes, limits, block_size=config.block_size)
        if backend is None:
            backend = TritonBackend() if self.device.type == "cuda" else TorchBackend()
        self.manager = CacheManager(self.plan, options=config.manager_options)
        self.arena = Arena(self.plan, device=self.device, layout=config.layout, kv_layout=backend.kv_layout)
        self.host = HostArena(self.arena, config.host_memory_bytes) if config.host_memory_bytes else None
        self.tables = MultiGroupBlockTable.from_plan(self.plan, device=self.device, tables=self.manager.tables)
        self.model = HostedModel(model, LayerCaches(self.plan, self.arena, backend), limits.max_model_len)
        self.passes = ForwardPasses(self.manager, self.tables, self.arena, self.host, self.model)
        self.scheduler = Scheduler(self.manager, config.preempt_every, propose)
        self.sampler = Sampler(self.device)
        self.tokenizer = tokenizer
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._num_requests = 0
        self._counters = Counters(len(self.plan.groups))

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
            on_text: called with the prompt's index and each piece of its first completion's text as it becomes certain.
            on_step: called with the counters after each step.

        Returns: the completions, prompt after prompt, `params.n` of each.
        Raises: InvalidRequest or NeverFits for a prompt that can never be served, InvalidRequest while requests of
            `add` are unfinished; nothing has run then.
        """
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"params: got {len(per_prompt)} for {len(prompts)} prompts, expected one for each")
        self.check_idle("generate")
        sequences = [
            self._new_sequence(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, per_prompt, strict=True))
        ]
        places = {self._queue(sequence): i for i, sequence in enumerate(sequences)}
        done: dict[tuple[int, int], Completion] = {}
        try:
            while self.scheduler.has_work:
                for output in self.step():
                    place = places[output.request_id]
                    if output.completion is not None:
                        done[place, output.choice_idx] = output.completion
                    if on_text is not None and output.text and output.choice_idx == 0:
                        on_text(place, output.text)
                if on_step is not None:
                    on_step(self.stats)
            return [done[i, choice] for i, p in enumerate(per_prompt) for choice in range(p.n)]
        finally:
            self._abandon()

    def add(self, prompt: Seq[int], params: SamplingParams, *, salt: Hashable = None) -> int:
        """Queue a request; return its id, which `step` names in its outputs.

        Args:
            salt: anything hashable; only requests with an equal one share cached prefixes.

        Raises: InvalidRequest or NeverFits if it can never be served.
        """
        return self._queue(self._new_sequence(0, prompt, params, salt))

    def abort(self, request_id: int) -> None:
        """Take a request out; what it computed stays cached.

        Raises: InvalidRequest if no unfinished request has that id.
        """
        sequences = [s for s in [*self.scheduler.running, *self.scheduler.waiting] if s.request_idx == request_id]
        if not sequences:
            raise InvalidRequest(f"request_id: got {request_id}, which no unfinished request has")
        for sequence in sequences:
            self._finish(sequence)

    def beam_search(self, prompt: Seq[int], params: BeamParams) -> list[Beam]:
        """Return the best continuations of a prompt, best first, as Hugging Face's beam search finds them.

        Raises: InvalidRequest for a prompt or a number of beams that can never be served, or while requests are
            unfinished; NeverFits or OutOfBlocks if the memory is too small.
        """
        self.check_idle("beam_search")
        limits = self.plan.limits
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        if params.num_beams > most:
            raise InvalidRequest(
                f"num_beams: got {params.num_beams}, expected at most {most}, the sequences and tokens of one step"
            )
        if 2 * params.num_beams > self._vocab_size:
            raise InvalidRequest(f"num_beams: got {params.num_beams}, expected at most half the vocabulary's tokens")
        sequence = self._new_sequence(0, prompt, SamplingParams(max_new_tokens=params.max_new_tokens))
        num_new = len(sequence.tokens) - sequence.num_prompt_tokens
        return search_beams(self.manager, self.passes, list(prompt), replace(params, max_new_tokens=num_new))

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Compute one batch and return what it added to which requests; without work, do nothing.

        It may be called again after the model failed: all running sequences are preempted then, and compute again what
        was not committed before.
        """
        if not self.scheduler.has_work:
            return []
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch.sequences:  # blocks on their way to the host are in the way
            self.passes.copy_only()
            batch = self.scheduler.schedule()
        if not batch.sequences:
            raise InvariantError("a sequence that fits alone could not be scheduled alone")
        self._counters.add_held(self.manager.pool.num_held)
        try:
            work, sampled = self._prepare(batch)
            logits = self.passes.run(work)
            token_ids = self.sampler.sample(logits, sampled)
            accepted = self._verify(batch, sampled, token_ids)
            outputs = self._hand_out(accepted, logits)
        except BaseException:
            # States are advanced in place: nothing may go on from where a step that failed left them.
            self.scheduler.preempt_all(keep=False)
            self.passes.settle()
            raise
        self._counters.num_steps += 1
        self._counters.seconds += time.perf_counter() - started
        return outputs

    @property
    def stats(self) -> EngineStats:
        """The counters so far."""
        counters = self._counters
        return EngineStats(
            num_steps=counters.num_steps,
            num_preemptions=self.manager.num_preemptions,
            num_generated_tokens=counters.num_generated_tokens,
            num_computed_tokens=self.passes.num_computed_tokens,
            num_hit_tokens=self.scheduler.num_hit_tokens,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_draft_tokens=counters.num_accepted_draft_tokens,
            seconds=counters.seconds,
            table_seconds=self.passes.table_seconds,
            groups=counters.group_stats(self.manager),
        )

    def check_idle(self, verb: str) -> None:
        """Raise InvalidRequest while a request is unfinished."""
        if self.scheduler.has_work:
            raise InvalidRequest(f"{verb}: requests of `add` are unfinished; call `step` or `abort` them")

    def _new_sequence(
        self, request_idx: int, prompt: Seq[int], params: SamplingParams, salt: Hashable = None
    ) -> Sequence:
        sequence = Sequence.create(request_idx, prompt, params, self.plan.limits.max_model_len)
        if max(prompt) >= self._vocab_size:
            raise InvalidRequest(
                f"prompt {request_idx}: got token id {max(prompt)}, the vocabulary has {self._vocab_size} tokens"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop: got {params.stop!r}, but the checkpoint has no tokenizer; use stop_token_ids")
        self.manager.check_fits(len(sequence.tokens))
        sequence.salt = salt
        return sequence

    def _queue(self, sequence: Sequence) -> int:
        sequence.request_idx = self._num_requests
        self._num_requests += 1
        if self.tokenizer is not None:
            sequence.stream = TextStream(self.tokenizer, sequence.params.stop)
        sequence.has_other_choices = sequence.params.n > 1
        self.scheduler.add(sequence)
        return sequence.request_idx

    def _prepare(self, batch: ScheduledBatch) -> tuple[PassInput, list[Sequence]]:
        """Flatten the batch; return with it the sequence that each row of logits samples for."""
        chunks: list[NDArray[np.int64]] = []
        logits_at: list[int] = []
        sampled: list[Sequence] = []
        num_flat = 0
        for sequence, num_new in zip(batch.sequences, batch.num_scheduled_tokens, strict=True):
            end = sequence.num_computed_tokens + num_new
            chunks.append(sequence.tokens[sequence.num_computed_tokens : end])
            num_flat += num_new
            if end >= sequence.num_tokens:
                first = num_flat - 1 - sequence.num_drafts
                logits_at += range(first, num_flat)
                sampled += [sequence] * (1 + sequence.num_drafts)
        prompts = [sequence.num_prompt_tokens for sequence in batch.sequences]
        work = PassInput(batch.rows, batch.num_scheduled_tokens, np.concatenate(chunks), prompts, logits_at)
        return work, sampled

    def _verify(
        self, batch: ScheduledBatch, sampled: Seq[Sequence], token_ids: Seq[int]
    ) -> list[tuple[Sequence, list[int]]]:
        """Take back the drafts that are not what was sampled, commit the rest; return each sequence's new tokens."""
        new, refused, idx = [], {}, 0
        while idx < len(sampled):
            sequence, num_drafts = sampled[idx], sampled[idx].num_drafts
            drafts = sequence.tokens[sequence.num_tokens : sequence.num_tokens + num_drafts].tolist()
            of_row = list(token_ids[idx : idx + num_drafts + 1])
            num_accepted = next((i for i in range(num_drafts) if drafts[i] != of_row[i]), num_drafts)
            new.append((sequence, of_row[: num_accepted + 1]))
            if num_accepted < num_drafts:
                refused[sequence.admitted_row] = num_drafts - num_accepted
            self._counters.num_draft_tokens += num_drafts
            self._counters.num_accepted_draft_tokens += num_accepted
            idx += num_drafts + 1
        self.manager.roll_back(list(refused), list(refused.values()))
        self.passes.settle()
        self._commit(batch.sequences)
        return new

    def _commit(self, sequences: Seq[Sequence]) -> None:
        """Make final what was computed and not taken back; states that went back to a checkpoint have nothing new."""
        rows, counts, chunks = [], [], []
        for sequence in sequences:
            computed = int(self.manager.num_computed_tokens[sequence.admitted_row])
            begin = sequence.num_computed_tokens
            if computed > begin:
                rows.append(sequence.admitted_row)
                counts.append(computed - begin)
                chunks.append(sequence.tokens[begin:computed])
                sequence.num_computed_tokens = computed
            sequence.num_drafts = 0
        if rows:
            self.manager.commit(rows, counts, np.concatenate(chunks))

    def _hand_out(self, new: Seq[tuple[Sequence, list[int]]], logits: torch.Tensor) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        for sequence, token_ids in new:
            others = sequence.other_choices() if sequence.has_other_choices else []
            sequence.has_other_choices = False
            started = self.scheduler.start_choices(sequence, others) if others else []
            outputs.append(self._take_tokens(sequence, token_ids))
            if started:
                of_prompt = logits[sum(len(ids) for _, ids in new[: len(outputs) - 1])].expand(len(started), -1)
                sampled = self.sampler.sample(of_prompt, started)
                outputs += [self._take_tokens(s, [token]) for s, token in zip(started, sampled, strict=True)]
        return outputs

    def _take_tokens(self, sequence: Sequence, token_ids: Seq[int]) -> StepOutput:
        """Give a sequence its new tokens, up to one that ends it."""
        taken, text, stream = [], "", sequence.stream
        for token_id in token_ids:
            sequence.append(token_id)
            taken.append(token_id)
            self._counters.num_generated_tokens += 1
            text += stream.push(token_id) if stream is not None else ""
            if token_id in sequence.params.stop_token_ids or (stream is not None and stream.stopped):
                sequence.finish_reason = "stop"
            elif sequence.num_tokens == len(sequence.tokens):
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                text += stream.finish() if stream is not None else ""
                self._finish(sequence)
                break
        return StepOutput(sequence.request_idx, sequence.choice_idx, taken, text, _completion(sequence))

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.sampler.forget(sequence)

    def _abandon(self) -> None:
        """Leave nothing behind: an interrupted run frees its rows, so the engine can be used again."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(sequence)


def _completion(sequence: Sequence) -> Completion | None:
    """Return what a finished sequence generated; None for one that goes on."""
    if sequence.finish_reason is None:
        return None
    return Completion(
        token_ids=sequence.new_token_ids,
        text=sequence.stream.text if sequence.stream is not None else None,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        finish_reason=sequence.finish_reason,
        choice_idx=sequence.choice_idx,
    )
