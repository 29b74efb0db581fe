"""Tokens a second side by side with Hugging Face's `generate` and `generate_batch`.

    python benchmarks/run_vs_hf.py [--model gemma-3-270m | hybrid] [--check] [--json] [--rounds 5]

Models: Gemma 3 270M (demo extra), or a random hybrid of about 100M parameters with Mamba-2 layers, which
`generate_batch` does not take.

Every round runs each system once on the same prompts, in float32, 8 prompts, 64 new tokens each, end tokens ignored; a
ratio is the median over rounds of (peer's seconds / our seconds) of the same round. Loads: `equal` (8 x 128 tokens) and
`mixed` (64 to 2,048 tokens). `generate` gets the prompts left-padded in one batch, as it wants them; our steps take up
to 2,048 tokens, so that the equal load is prefilled in one forward pass on both sides.

`--check` exits 1 if a target is missed, a peer cannot be set up, or our tokens differ from Hugging Face's one-prompt
greedy output by more than ties.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from hybrid_model import hybrid_model
from transformers import GenerationConfig

from hybridkv.cli.run import default_cache_dir
from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.runner import Engine, EngineConfig, SamplingParams
from hybridkv.runner.checkpoints import DEMO_MODEL, load_checkpoint, resolve_checkpoint
from hybridkv.runner.verify import StopRules, verify_greedy

HYBRID = "hybrid"
LOADS = {"equal": [128] * 8, "mixed": [64, 128, 256, 512, 768, 1024, 1536, 2048]}
NEW_TOKENS = 64
TARGETS = {
    ("equal", "generate"): 1.0,
    ("mixed", "generate"): 1.5,
    ("equal", "generate_batch"): 1.5,
    ("mixed", "generate_batch"): 1.5,
}
MAX_TABLE_SHARE = 0.02

Tokens = list[list[int]]
System = Callable[[Tokens], Tokens]


@dataclass(frozen=True)
class Row:
    """One load against one peer; speeds are medians over rounds."""

    load: str
    peer: str
    our_tokens_per_second: float
    peer_tokens_per_second: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    target: float
    num_rounds: int
    num_prompts_equal: int
    table_share: float
    table_us_per_step: float

    @property
    def is_met(self) -> bool:
        """Whether ratio and table time meet their targets."""
        return self.ratio >= self.target and self.table_share < MAX_TABLE_SHARE


class Ours:
    """The engine, with its step's table time."""

    def __init__(self, model: torch.nn.Module, config: dict[str, object], memory_bytes: int, budget: int) -> None:
        options = CacheOptions(kv_dtype="float32", conv_dtype="float32")
        spec = model_spec_from_config(config, name="benchmark", options=options)
        self.model = model
        self.engine = Engine(model, spec, None, EngineConfig(memory_bytes, max_num_batched_tokens=budget))

    def __call__(self, prompts: Tokens) -> Tokens:
        """Generate for all prompts together."""
        self.model.set_attn_implementation("hybridkv")
        params = SamplingParams(max_new_tokens=NEW_TOKENS)
        return [completion.token_ids for completion in self.engine.generate(prompts, params)]

    def table_seconds(self) -> tuple[float, float, int]:
        """Return the seconds spent on tables, in steps altogether, and the number of steps so far."""
        stats = self.engine.stats
        return stats.table_seconds, stats.seconds, stats.num_steps


def hf_generate(model: torch.nn.Module) -> System:
    """Return Hugging Face's `generate` on a left-padded batch."""

    def run(prompts: Tokens) -> Tokens:
        model.set_attn_implementation("sdpa")
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=_plain_config())
        return out[:, width:].tolist()

    return run


def hf_generate_batch(model: torch.nn.Module) -> System:
    """Return Hugging Face's own continuous batching."""

    def run(prompts: Tokens) -> Tokens:
        model.set_attn_implementation("sdpa")
        outputs = model.generate_batch(inputs=prompts, generation_config=_plain_config(), progress_bar=False)
        found = {tuple(output.prompt_ids): output for output in outputs.values()}
        return [list(found[tuple(prompt)].generated_tokens) for prompt in prompts]

    return run


def _plain_config() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)


def run_load(load: str, ours: Ours, peers: dict[str, System], num_rounds: int) -> list[Row]:
    """Run one load for all rounds; verify our tokens against one-prompt greedy generation.

    Raises: RuntimeError if they differ by more than ties.
    """
    rng = np.random.default_rng(0)
    vocab_size = ours.model.get_input_embeddings().num_embeddings
    prompts = [rng.integers(5, min(vocab_size, 200_000), length).tolist() for length in LOADS[load]]
    outputs = ours(prompts)
    verification = verify_greedy(ours.model, prompts, outputs, StopRules([NEW_TOKENS] * len(prompts)))
    if not verification.equal:
        raise RuntimeError(f"{load}: our tokens differ from Hugging Face's: {verification.first_difference}")
    equal = {name: sum(a == b for a, b in zip(outputs, peer(prompts), strict=True)) for name, peer in peers.items()}
    before = ours.table_seconds()
    our_seconds, peer_seconds = [], {name: [] for name in peers}
    for round_idx in range(num_rounds):
        systems: list[tuple[str, System]] = [("ours", ours), *peers.items()]
        for name, system in systems[:: 1 if round_idx % 2 == 0 else -1]:
            started = time.perf_counter()
            system(prompts)
            (our_seconds if name == "ours" else peer_seconds[name]).append(time.perf_counter() - started)
            print(
                f"{load} round {round_idx + 1}/{num_rounds}: {name} {time.perf_counter() - started:.1f} s",
                file=sys.stderr,
            )
    table, total, steps = (after - b for after, b in zip(ours.table_seconds(), before, strict=True))
    num_tokens = NEW_TOKENS * len(prompts)
    rows = []
    for name, seconds in peer_seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(seconds, our_seconds, strict=True)]
        rows.append(
            Row(
                load=load,
                peer=name,
                our_tokens_per_second=num_tokens / statistics.median(our_seconds),
                peer_tokens_per_second=num_tokens / statistics.median(seconds),
                ratio=statistics.median(ratios),
                lowest_ratio=min(ratios),
                highest_ratio=max(ratios),
                target=TARGETS[load, name],
                num_rounds=num_rounds,
                num_prompts_equal=equal[name],
                table_share=table / total,
                table_us_per_step=1e6 * table / steps,
            )
        )
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Render the rows as a Markdown table."""
    lines = [
        "| load | peer | ours tok/s | peer tok/s | ratio (lowest-highest) | target | equal prompts | table time |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.load} | {row.peer} | {row.our_tokens_per_second:.1f} | {row.peer_tokens_per_second:.1f} "
            f"| {row.ratio:.2f} ({row.lowest_ratio:.2f}-{row.highest_ratio:.2f}) | {row.target} "
            f"| {row.num_prompts_equal} of 8 | {100 * row.table_share:.2f} %, {row.table_us_per_step:.0f} us a step |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where `--check` finds a target missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[DEMO_MODEL, HYBRID], default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each load")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument(
        "--peers", nargs="+", choices=["generate", "generate_batch"], default=["generate", "generate_batch"]
    )
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="of one of our steps; peers have no limit")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir())
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    arguments = parser.parse_args(argv)
    makers = {"generate": hf_generate, "generate_batch": hf_generate_batch}
    if arguments.model == HYBRID:
        model, config = hybrid_model()
        makers = {"generate": hf_generate}
    else:
        checkpoint = load_checkpoint(resolve_checkpoint(DEMO_MODEL, arguments.cache_dir), "float32")
        model, config = checkpoint.model, dict(checkpoint.config)
    ours = Ours(model, config, 2**30, arguments.max_batched_tokens)
    peers = {name: makers[name](model) for name in arguments.peers if name in makers}
    try:
        rows = [row for load in arguments.loads for row in run_load(load, ours, peers, arguments.rounds)]
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else format_table(rows))
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        print(f"missed: {row.load} against {row.peer}: {row}", file=sys.stderr)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
