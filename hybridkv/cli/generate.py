"""The work of `hybridkv run`: find, load, generate, verify, print."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import TextIO

from hybridkv._torch import torch
from hybridkv.cli.output import RunResult, print_json, print_stats, print_text
from hybridkv.cli.prompts import Prompt
from hybridkv.cli.run import RunOptions
from hybridkv.cli.terminal import hidden_stderr, progress_bar, quiet_libraries
from hybridkv.errors import InvalidRequest
from hybridkv.hf_config import CacheOptions, model_spec_from_config, read_config
from hybridkv.runner import Completion, Engine, EngineConfig, EngineStats, SamplingParams
from hybridkv.runner.checkpoints import Checkpoint, checkpoint_dtype, load_checkpoint, resolve_checkpoint
from hybridkv.runner.text import Tokenizer
from hybridkv.runner.verify import StopRules, Verification, verify_greedy
from hybridkv.specs import ModelSpec

_CPU_MEMORY_BYTES = 2**30
_GPU_MEMORY_FRACTION = 0.9
_CPU_BATCHED_TOKENS = 512
_GPU_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Request:
    """One prompt as the engine takes it."""

    token_ids: list[int]
    params: SamplingParams


def generate(options: RunOptions) -> int:
    """Run the command; return its exit code.

    Raises: SpecError, InvalidRequest or CheckpointError for what the user got wrong.
    """
    with _clean_stdout() as out, quiet_libraries():
        device = _device(options.device)
        params = _params(options)
        checkpoint, spec = _load(options, device)
        engine = Engine(checkpoint.model, spec, checkpoint.tokenizer, _engine_config(options, device))
        requests = _requests(options, params, checkpoint, engine.plan.limits.max_model_len)
        streams = not options.json and len(requests) == 1
        completions = _generate(engine, requests, _writer(out) if streams else None)
        if streams:
            out.write("\n")
        verification = _verify(engine, checkpoint, requests, completions) if options.verify else None
        texts = [prompt.text for prompt in options.prompts]
        result = RunResult(options.model, texts, completions, engine.stats, verification)
        if options.json:
            print_json(result, out)
        else:
            print_text(result, out, streamed=streams)
        if options.stats:
            print_stats(engine.stats, sys.stderr if options.json else out)
        out.flush()
    return 1 if verification is not None and not verification.equal else 0


@contextmanager
def _clean_stdout() -> Iterator[TextIO]:
    """Yield stdout for our own output; what anyone else prints meanwhile goes to stderr."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield out


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device: got {name!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device: got {name!r}, torch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return device


def _load(options: RunOptions, device: torch.device) -> tuple[Checkpoint, ModelSpec]:
    """Load the checkpoint; an unsupported one is refused before its weights are read."""
    with progress_bar() as report, hidden_stderr():
        path = resolve_checkpoint(options.model, options.cache_dir, report)
        config = read_config(path)
        dtype = options.dtype or ("float32" if device.type == "cpu" else checkpoint_dtype(config))
        cache = CacheOptions.model_validate({"kv_dtype": dtype, "conv_dtype": dtype})
        spec = model_spec_from_config(config, name=options.model, options=cache)
        report("Loading weights", 0.0)
        return load_checkpoint(path, dtype, device), spec


def _params(options: RunOptions) -> SamplingParams:
    """Return what all prompts share, checked before anything is loaded."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop=options.stop,
    )


def _requests(options: RunOptions, shared: SamplingParams, checkpoint: Checkpoint, max_model_len: int) -> list[Request]:
    requests = []
    for prompt_idx, prompt in enumerate(options.prompts):
        token_ids = _token_ids(prompt_idx, prompt, checkpoint.tokenizer)
        params = replace(
            shared,
            # No more than can follow, so that the progress bar knows its end.
            max_new_tokens=min(prompt.max_new_tokens or options.max_new_tokens, max_model_len),
            # One seed for the run; equal prompts still differ.
            seed=None if options.seed is None else options.seed + prompt_idx,
            stop_token_ids=checkpoint.eos_token_ids,
        )
        requests.append(Request(token_ids, params))
    return requests


def _token_ids(prompt_idx: int, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    assert prompt.text is not None  # a prompt has one of the two
    if tokenizer is None:
        raise InvalidRequest(
            f"prompt {prompt_idx}: is a text, but the checkpoint has no tokenizer; give token_ids in a --prompts-file"
        )
    return tokenizer.encode(prompt.text)


def _engine_config(options: RunOptions, device: torch.device) -> EngineConfig:
    gpu = device.type == "cuda"
    memory_bytes = options.memory_bytes
    if memory_bytes is None:
        free = torch.cuda.mem_get_info(device)[0] if gpu else 0
        memory_bytes = int(free * _GPU_MEMORY_FRACTION) if gpu else _CPU_MEMORY_BYTES
    batched = options.max_num_batched_tokens
    if batched is None:
        batched = _GPU_BATCHED_TOKENS if gpu else _CPU_BATCHED_TOKENS
    return EngineConfig(
        memory_bytes=memory_bytes,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=options.max_model_len,
        preempt_every=options.preempt_every,
        prefix_caching=options.prefix_caching,
        resume_every=options.resume_every,
        host_memory_bytes=options.host_memory_bytes,
        watermark=options.watermark,
    )


def _writer(out: TextIO) -> Callable[[int, str], None]:
    def write(_prompt_idx: int, piece: str) -> None:
        out.write(piece)
        out.flush()

    return write


def _generate(
    engine: Engine, requests: Sequence[Request], on_text: Callable[[int, str], None] | None
) -> list[Completion]:
    prompts = [request.token_ids for request in requests]
    params = [request.params for request in requests]
    if on_text is not None:  # the text itself shows the progress
        return engine.generate(prompts, params, on_text=on_text)
    total = sum(p.max_new_tokens for p in params)
    with progress_bar() as report:

        def on_step(stats: EngineStats) -> None:
            report(f"Generating, {stats.tokens_per_second:.1f} tokens/s", stats.num_generated_tokens / total)

        return engine.generate(prompts, params, on_step=on_step)


def _verify(
    engine: Engine, checkpoint: Checkpoint, requests: Sequence[Request], completions: Sequence[Completion]
) -> Verification:
    tokenizer = checkpoint.tokenizer
    stop = requests[0].params.stop
    longest = engine.plan.limits.max_model_len

    def ends(token_ids: Sequence[int]) -> bool:
        if tokenizer is None or not stop:
            return False
        text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return any(one in text for one in stop)

    rules = StopRules(
        [min(request.params.max_new_tokens, longest - len(request.token_ids)) for request in requests],
        checkpoint.eos_token_ids,
        ends,
    )
    prompts = [request.token_ids for request in requests]
    outputs = [completion.token_ids for completion in completions]
    with progress_bar() as report:
        return verify_greedy(
            checkpoint.model,
            prompts,
            outputs,
            rules,
            lambda done, total: report("Comparing with Hugging Face", done / total),
        )
