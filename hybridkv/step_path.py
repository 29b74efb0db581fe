"""The two ways a step reaches the mirror: numpy on a CPU, one copy and one launch on every other device."""

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.change_log import DirtySpans
from hybridkv.page_index import IndexBuffer
from hybridkv.staging import pack, payload_capacity, rounds, staging_words
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.constants import PAD_SLOT_ID
from hybridkv_kernels.step_layout import NUM_INDEX_COLUMNS
from hybridkv_kernels.step_numpy import NumpyStep
from hybridkv_kernels.step_reference import StepArrays
from hybridkv_kernels.step_tables import StepOutputs, prepare_step

_MAX_KEPT_LAUNCHES = 64


class StepPath(Protocol):
    """Brings the mirror up to date and computes a batch's outputs."""

    num_words_copied: int
    num_rounds: int

    def stage(self, batch: StepBatch, outputs: StepOutputs, extra_tokens: torch.Tensor | None) -> None:
        """Hand a step's work to the device; `outputs` are views for the padded batch. What fails stays dirty."""
        ...

    def launch(self, outputs: StepOutputs, extra_tokens: torch.Tensor | None) -> None:
        """Compute the staged step; on a GPU, on the current stream, which may be capturing."""
        ...

    def replayed(self) -> None:
        """Take note that a captured launch computes the staged step."""
        ...


class NumpyPath:
    """A step on the host: changed words go straight to the mirror."""

    def __init__(self, arrays: TableArrays, words: torch.Tensor, index: IndexBuffer) -> None:
        self._arrays, self._mirror = arrays, words.numpy()
        self._mirror_views = arrays.views(self._mirror)
        self._step = NumpyStep(arrays.group_metas, index.metas, arrays.is_ring, arrays.num_rows, arrays.native)
        self._last: tuple[StepOutputs, StepArrays] | None = None
        self._batch = StepBatch.of([], [], [])
        self.num_words_copied, self.num_rounds = 0, 1

    def stage(self, batch: StepBatch, outputs: StepOutputs, extra_tokens: torch.Tensor | None) -> None:
        """Copy what changed, write the batch's geometry."""
        if self._last is None or self._last[0] is not outputs:
            self._last = outputs, outputs.arrays()
        out = self._last[1]
        self.num_words_copied = self._arrays.copy_dirty(self._mirror, self._mirror_views)
        if extra_tokens is not None:
            extra = extra_tokens.numpy()[batch.rows]
            batch = replace(batch, computed=batch.computed + extra, seq_lens=batch.seq_lens + extra)
        self._batch = batch
        native, given = self._arrays.native, (batch.rows, batch.query_starts, batch.computed)
        outs = out.rows, out.query_start_loc, out.seq_lens, out.zero_start, out.token_rows, out.positions
        if native is not None and native.write_geometry(*given, *outs):
            return
        num_reqs = batch.num_reqs
        _fill(out.rows, batch.rows, PAD_SLOT_ID)
        _fill(out.query_start_loc, batch.query_starts, batch.num_tokens)
        _fill(out.seq_lens, batch.seq_lens, 0)
        np.equal(batch.computed, 0, out=out.zero_start[:num_reqs])
        if len(out.zero_start) > num_reqs:
            out.zero_start[num_reqs:] = False
        batch.write_tokens(out.token_rows, out.positions)

    def launch(self, outputs: StepOutputs, _extra_tokens: torch.Tensor | None) -> None:
        """Map the staged batch."""
        assert self._last is not None
        assert self._last[0] is outputs
        self._step.run(self._mirror, self._batch.rows, self._batch.computed, self._batch.num_tokens, self._last[1])

    def replayed(self) -> None:
        """Do nothing: there are no graphs on a CPU."""


def _fill(target: NDArray[np.int32], values: NDArray[np.int64], padding: int) -> None:
    target[: len(values)] = values
    if len(target) > len(values):
        target[len(values) :] = padding


class _HostBuffer:
    """A staging buffer on the host, pinned beside a GPU; `copied` says when it may be packed again."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words = self.tensor.numpy()
        self.copied = _event(device)


class _DeviceBuffer:
    """A staging buffer on the device; `consumed` says when the launch that read it has finished."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.consumed = _event(device)


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class TritonPath:
    """A step as one copy and one launch.

    Two host buffers take turns, so the host may pack the next step while the last copy is in flight. Copy and launch
    follow each other on one stream, so that one device buffer serves all steps and a captured launch reads the right
    one. With a copy stream the copy may run beside the forward pass before: then two device buffers take turns, a
    launch waits for its copy, and a copy for the launch that last read its buffer. A graph would freeze one of the two,
    so capturing a launch is refused then.
    """

    def __init__(
        self,
        arrays: TableArrays,
        words: torch.Tensor,
        index: IndexBuffer,
        max_num_batched_tokens: int,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._arrays, self._words, self._copy_stream = arrays, words, copy_stream
        self._max_columns = index.max_columns
        device = words.device
        group_metas = np.array([meta.as_row() for meta in arrays.group_metas], dtype=np.int64)
        index_metas = np.array([meta.as_row() for meta in index.metas], dtype=np.int64).reshape(-1, NUM_INDEX_COLUMNS)
        self._group_meta = torch.from_numpy(group_metas).to(device)
        self._index_meta = torch.from_numpy(index_metas).to(device)
        num_words = staging_words(arrays, arrays.num_rows, max_num_batched_tokens)
        self._capacity = payload_capacity(arrays, arrays.num_rows, num_words)
        self._host = [_HostBuffer(num_words, device) for _ in range(2)]
        self._device = [_DeviceBuffer(num_words, device) for _ in range(1 if copy_stream is None else 2)]
        self._turn = 0
        self._staged, self._is_launched = DirtySpans.none(), True
        self._launches: dict[tuple[int, int, int], Launch] = {}
        self.num_words_copied, self.num_rounds = 0, 1

    def stage(self, batch: StepBatch, outputs: StepOutputs, _extra_tokens: torch.Tensor | None) -> None:
        """Copy a step's work, in extra rounds if more changed than the staging buffer holds."""
        if not self._is_launched:
            # What was staged before reached the buffer, which is packed anew, but not the tables.
            self._arrays.mark_again(self._staged)
        spans = self._arrays.take_dirty()
        self.num_words_copied = self.num_rounds = 0
        try:
            *first_parts, last_part = rounds(spans, self._capacity)
            for part in first_parts:
                nothing = outputs.narrowed(0, 0)
                self._copy(part, StepBatch.of([], [], []))
                self.launch(nothing, None)
            self._copy(last_part, batch)
            self._staged, self._is_launched = spans, False
        except BaseException:
            self._arrays.mark_again(spans)
            raise

    def launch(self, outputs: StepOutputs, extra_tokens: torch.Tensor | None) -> None:
        """Launch the kernel on what was staged last; launching it again changes nothing.

        What was staged and not launched, or failed to launch, travels again with the next step. A captured launch keeps
        its padded sizes, whether there were extra tokens, and their tensor's address: replay it for steps like that.

        Raises: RuntimeError on a stream that is capturing, for tables with a copy stream.
        """
        is_capturing = _is_capturing(self._words.device)
        if is_capturing and self._copy_stream is not None:
            raise RuntimeError(
                "launch: got a stream that is capturing and tables with a copy stream, whose steps alternate between "
                "two buffers while a graph keeps one; make the tables without copy_stream"
            )
        self._prepared(outputs, extra_tokens).run()
        if not is_capturing:  # a capture records the launch, it runs with the first replay
            self.replayed()

    def replayed(self) -> None:
        """Take note that a captured launch of what was staged last is on the current stream."""
        self._is_launched = True
        buffer = self._device[self._turn % len(self._device)]
        if buffer.consumed is not None and self._copy_stream is not None:
            buffer.consumed.record(torch.cuda.current_stream(self._words.device))

    def _prepared(self, outputs: StepOutputs, extra_tokens: torch.Tensor | None) -> Launch:
        """Return the launch for these outputs; without extra tokens its arguments are the same every time."""
        which = self._turn % len(self._device)
        key = which, len(outputs.rows), len(outputs.positions)
        launch = self._launches.get(key) if extra_tokens is None else None
        if launch is None:
            launch = prepare_step(
                self._words,
                self._group_meta,
                self._index_meta,
                self._device[which].tensor,
                extra_tokens,
                out=outputs,
                num_rows=self._arrays.num_rows,
                max_columns=self._max_columns,
            )
            if extra_tokens is None:
                if len(self._launches) >= _MAX_KEPT_LAUNCHES:
                    self._launches.clear()
                self._launches[key] = launch
        return launch

    def _copy(self, spans: DirtySpans, batch: StepBatch) -> None:
        """Pack a step and copy it; what follows on the current stream sees it."""
        turn = (self._turn + 1) % 2
        host, on_device = self._host[turn], self._device[turn % len(self._device)]
        if host.copied is not None:
            host.copied.synchronize()  # the host overwrites what that copy read
        num_words = pack(self._arrays, spans, batch, host.words)
        target, source = on_device.tensor[:num_words], host.tensor[:num_words]
        if self._copy_stream is None:
            target.copy_(source, non_blocking=True)
            if host.copied is not None:
                host.copied.record(torch.cuda.current_stream(self._words.device))
        else:
            assert host.copied is not None
            assert on_device.consumed is not None
            with torch.cuda.stream(self._copy_stream):
                self._copy_stream.wait_event(on_device.consumed)
                target.copy_(source, non_blocking=True)
                host.copied.record(self._copy_stream)
            torch.cuda.current_stream(self._words.device).wait_event(host.copied)
        self._turn = turn  # not before: until the copy was issued, launches read the last one
        self.num_words_copied += num_words
        self.num_rounds += 1
