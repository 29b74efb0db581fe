"""The result of `hybridkv run` as text, JSON, tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from hybridkv.runner import Completion, EngineStats
from hybridkv.runner.verify import Verification
from hybridkv.units import format_bytes

_PROMPT_CHARACTERS = 100
_GROUP_FIELDS = (
    "lifecycle",
    "num_layers",
    "block_size",
    "num_blocks",
    "peak_blocks",
    "peak_blocks_per_row",
    "num_blocks_freed_out_of_window",
    "cached_blocks",
)


@dataclass(frozen=True)
class RunResult:
    """What a run has to say; a prompt given as token ids has no text."""

    model: str
    prompts: Sequence[str | None]
    completions: Sequence[Completion]
    stats: EngineStats
    verification: Verification | None


def print_json(result: RunResult, out: TextIO) -> None:
    """Print the result as one JSON object."""
    stats, verification = result.stats, result.verification
    document = {
        "model": result.model,
        "outputs": [
            {
                "prompt": prompt,
                "token_ids": completion.token_ids,
                "text": completion.text,
                "num_prompt_tokens": completion.num_prompt_tokens,
                "num_cached_tokens": completion.num_cached_tokens,
                "finish_reason": completion.finish_reason,
            }
            for prompt, completion in zip(result.prompts, result.completions, strict=True)
        ],
        "stats": {
            "tokens_per_second": stats.tokens_per_second,
            "num_preemptions": stats.num_preemptions,
            "num_steps": stats.num_steps,
            "num_computed_tokens": stats.num_computed_tokens,
            "num_hit_tokens": stats.num_hit_tokens,
            "groups": [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in stats.groups],
        },
        "verify": None
        if verification is None
        else {
            "equal": verification.equal,
            "first_difference": verification.first_difference and asdict(verification.first_difference),
            "ties": [asdict(tie) for tie in verification.ties],
        },
    }
    out.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_text(result: RunResult, out: TextIO, *, streamed: bool) -> None:
    """Print a block per prompt, unless the only one's text was streamed, then the outcome of the verification."""
    for prompt_idx, (prompt, completion) in enumerate(zip(result.prompts, result.completions, strict=True)):
        text = completion.text
        if text is None:
            text = "token ids " + " ".join(map(str, completion.token_ids))
        if len(result.completions) > 1:
            out.write(f"[{prompt_idx}] {_shown(prompt, completion)}\n -> {text}\n\n")
        elif not streamed or completion.text is None:
            out.write(f"{text}\n")
    if result.verification is not None:
        out.write(_verification_line(result.verification, result.completions) + "\n")


def print_stats(stats: EngineStats, out: TextIO) -> None:
    """Print a table with a row per KV cache group, then the totals."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="KV cache groups", title_justify="left")
    table.add_column("lifecycle", no_wrap=True)
    for heading in (
        "layers",
        "block size",
        "blocks",
        "held (mean)",
        "peak",
        "peak bytes",
        "peak a row",
        "freed out of window",
        "cached",
    ):
        table.add_column(heading, justify="right")
    for group in stats.groups:
        numbers = (
            group.num_layers,
            group.block_size,
            group.num_blocks,
            f"{group.mean_held_blocks:.1f}",
            group.peak_blocks,
            format_bytes(group.peak_blocks * group.block_bytes),
            group.peak_blocks_per_row,
            group.num_blocks_freed_out_of_window,
            group.cached_blocks,
        )
        table.add_row(group.lifecycle, *map(str, numbers))
    console = Console(file=out) if out.isatty() else Console(file=out, width=120)
    console.print(table)
    console.print(
        f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.num_preemptions} preemptions",
        highlight=False,
    )
    console.print(
        f"{stats.num_computed_tokens} tokens computed, {stats.num_hit_tokens} found in the cache", highlight=False
    )


def _shown(prompt: str | None, completion: Completion) -> str:
    if prompt is None:
        return f"({completion.num_prompt_tokens} token ids)"
    line = " ".join(prompt.split())
    return line if len(line) <= _PROMPT_CHARACTERS else line[: _PROMPT_CHARACTERS - 3] + "..."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _verification_line(verification: Verification, completions: Sequence[Completion]) -> str:
    first = verification.first_difference
    if first is None:
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return (
            f"verify: equal to Hugging Face ({_counted(len(completions), 'prompt')}, {_counted(num_tokens, 'token')}, "
            f"{_counted(len(verification.ties), 'tie')})"
        )
    expected = "the end" if first.expected is None else f"token {first.expected}"
    got = "the end" if first.got is None else f"token {first.got}"
    gap = "" if first.gap is None else f", logit gap {first.gap:.2g}"
    return (
        f"verify: differs from Hugging Face at prompt {first.prompt_idx}, token {first.token_idx}: "
        f"expected {expected}, got {got}{gap}"
    )
