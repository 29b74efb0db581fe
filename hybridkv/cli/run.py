"""`hybridkv run`: its options, the checks that need no torch."""

import importlib.util
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.prompts import Prompt, read_prompts
from hybridkv.cli.terminal import guarded, print_error
from hybridkv.errors import InvalidRequest
from hybridkv.units import parse_bytes

_RUN_EXTRA = ("torch", "transformers", "safetensors", "tokenizers")


class DtypeName(StrEnum):
    """Dtypes the runner computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class RunOptions:
    """The command line of `hybridkv run`, checked as far as that needs no model; None means chosen by the device."""

    model: str
    prompts: list[Prompt]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    seed: int | None
    memory_bytes: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_model_len: int | None
    dtype: str | None
    device: str | None
    cache_dir: Path
    preempt_every: int
    prefix_caching: bool
    resume_every: int | None
    host_memory_bytes: int
    watermark: float
    json: bool
    stats: bool
    verify: bool


def default_cache_dir() -> Path:
    """Return the user's cache folder for converted checkpoints; the one place that asks the environment."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hybridkv"


def run(  # noqa: PLR0913  (one argument an option is how typer works)
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder (config.json, safetensors), .gguf file, gemma-3-270m, or a Hugging Face Hub id.",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to continue; - reads one from stdin.", show_default=False),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line, or JSON lines with prompt or token_ids, optionally max_new_tokens.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 from all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Makes sampling repeatable.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of the KV cache, such as 1GiB. (default: 1GiB, GPU: 90% of free)"),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step. (default: 512, GPU: 8192)")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest sequence. (default: the model's)")
    ] = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Of weights and cache. (default: float32, GPU: the checkpoint's)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. (default: cuda if there is one)")] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where converted GGUF files are kept. (default: ~/.cache/hybridkv)"),
    ] = None,
    preempt_every: Annotated[int, typer.Option(min=0, help="Preempt a sequence every N steps, as a test.")] = 0,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Keep nothing of ended sequences for prompts that begin alike.")
    ] = False,
    resume_every: Annotated[
        int | None, typer.Option(min=1, help="Keep windows and states every N tokens too. (default: at ends only)")
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for preempted sequences, such as 1GiB. (default: none)"),
    ] = None,
    watermark: Annotated[
        float, typer.Option(help="Part of the memory that new sequences leave to running ones, 0 to below 1.")
    ] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print blocks, bytes, cache hits, preemptions, speed.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with Hugging Face's own generation; exit 1 if unequal.")
    ] = False,
) -> None:
    """Generate text with a Hugging Face checkpoint whose cache hybridkv manages."""

    def action() -> int:
        if verify and temperature > 0:
            raise InvalidRequest(
                f"--verify: compares greedy outputs only, got --temperature {temperature}; leave one out"
            )
        options = RunOptions(
            model=model,
            prompts=read_prompts(prompts or [], prompts_file),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=tuple(stop or ()),
            seed=seed,
            memory_bytes=None if memory is None else parse_bytes(memory),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            dtype=None if dtype is None else dtype.value,
            device=device,
            cache_dir=default_cache_dir() if cache_dir is None else cache_dir,
            preempt_every=preempt_every,
            prefix_caching=not no_prefix_cache,
            resume_every=resume_every,
            host_memory_bytes=0 if swap is None else parse_bytes(swap),
            watermark=watermark,
            json=json,
            stats=stats,
            verify=verify,
        )
        return _execute(options)

    raise typer.Exit(guarded(action))


def lacks_run_extra(command: str) -> bool:
    """Return whether a package of the run extra is missing, after a line that says so."""
    missing = [name for name in _RUN_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print_error(f"{command} needs {', '.join(missing)}; install the run extra with pip install 'hybridkv[run]'")
    return bool(missing)


def _execute(options: RunOptions) -> int:
    if lacks_run_extra("run"):
        return 2
    from hybridkv.cli.generate import generate

    return generate(options)
