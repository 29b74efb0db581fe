"""Compile every kernel offline for several GPUs to list its registers, spills, shared memory.

The launches are those of the production launchers, on empty CPU tensors, through a driver stub: no GPU is needed.
TRITON_INTERPRET must not be set. Sources of the figures: `ptxas -v` on the PTX for NVIDIA, the comments of the assembly
for AMD, the compiler's metadata for shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from copy_launches import copy_launches
from matrix_state_launches import matrix_state_launches
from page_index_launches import page_index_launches
from recurrent_launches import recurrent_launches
from triton.backends.compiler import GPUTarget

from hybridkv_kernels._triton import Launch, is_interpreted
from hybridkv_kernels.group_meta import NUM_META_COLUMNS
from hybridkv_kernels.paged_attention import AttentionParams, PagedBatch, prepare_paged_attention
from hybridkv_kernels.step_layout import NUM_INDEX_COLUMNS
from hybridkv_kernels.step_tables import StepOutputs, prepare_step

DOCS = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
TABLE_BEGIN, TABLE_END = "<!-- compile table: begin -->", "<!-- compile table: end -->"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of spilled registers a (case, target) may have; a case that is not listed may have none.
SPILL_ALLOWANCE: dict[tuple[str, str], int] = {}


@dataclass(frozen=True)
class Case:
    """One kernel variant under the name it has in the table."""

    name: str
    launch: Launch


@dataclass(frozen=True)
class Row:
    """What one compile gave; spills in bytes (stores plus loads on NVIDIA, 4 bytes a spilled VGPR on AMD)."""

    case: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int

    @property
    def is_allowed(self) -> bool:
        """Tell whether the spills stay within the documented allowance."""
        return self.spill_bytes <= SPILL_ALLOWANCE.get((self.case, self.target), 0)


class _StubDriver:
    """The part of a Triton driver that compiling needs: one device of a given target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def _step_case(num_tokens: int, max_columns: int, with_extra: bool) -> Launch:
    num_groups, num_rows, num_words, num_index = 8, 256, 1 << 20, 1 << 16
    i32, i64 = torch.int32, torch.int64
    outputs = StepOutputs(
        rows=torch.empty(num_rows, dtype=i32),
        query_start_loc=torch.empty(num_rows + 1, dtype=i32),
        seq_lens=torch.empty(num_rows, dtype=i32),
        zero_start=torch.empty(num_rows, dtype=torch.bool),
        token_rows=torch.empty(num_tokens, dtype=i32),
        positions=torch.empty(num_tokens, dtype=i64),
        slots=torch.empty(num_groups, num_tokens, dtype=i64),
        state_slots=torch.empty(4, num_rows, dtype=i64),
        index=torch.empty(num_index, dtype=i32),
    )
    return prepare_step(
        torch.empty(num_words, dtype=i32),
        torch.empty(num_groups, NUM_META_COLUMNS, dtype=i64),
        torch.empty(num_groups, NUM_INDEX_COLUMNS, dtype=i64),
        torch.empty(1 << 16, dtype=i32),
        torch.empty(num_rows, dtype=i32) if with_extra else None,
        out=outputs,
        num_rows=num_rows,
        max_columns=max_columns,
    )


@dataclass(frozen=True)
class AttentionVariant:
    """Sizes, features of one attention launch; `dims` are the head sizes of keys, values."""

    dims: tuple[int, int]
    max_query_len: int
    dtype: torch.dtype = torch.bfloat16
    group: int = 4
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    num_splits: int = 1

    def prepare(self) -> tuple[Launch, ...]:
        """Return the launches of the production launcher for empty tensors of these sizes."""
        num_rows, num_kv_heads, num_blocks, block_size, width = 32, 8, 64, 16, 512
        num_heads, num_tokens = num_kv_heads * self.group, num_rows * self.max_query_len
        batch = PagedBatch(
            block_table=torch.empty(64, width, dtype=torch.int32),
            rows=torch.empty(num_rows, dtype=torch.int32),
            query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.empty(num_rows, dtype=torch.int32),
        )
        params = AttentionParams(
            scale=0.125,
            width=width,
            max_query_len=self.max_query_len,
            window=self.window,
            softcap=self.softcap,
            num_splits=self.num_splits,
        )
        key_dim, value_dim = self.dims
        return prepare_paged_attention(
            torch.empty(num_tokens, num_heads, key_dim, dtype=self.dtype),
            torch.empty(num_blocks, block_size, num_kv_heads, key_dim, dtype=self.dtype),
            torch.empty(num_blocks, block_size, num_kv_heads, value_dim, dtype=self.dtype),
            batch,
            params,
            out=torch.empty(num_tokens, num_heads, value_dim, dtype=self.dtype),
            sinks=torch.empty(num_heads, dtype=self.dtype) if self.has_sinks else None,
        )


_D64, _D96, _D128, _D256 = (64, 64), (96, 96), (128, 128), (256, 256)
_FP16, _FP32 = torch.float16, torch.float32
ATTENTION_VARIANTS = {
    "bf16 64 decode": AttentionVariant(_D64, 1),
    "bf16 64 prefill": AttentionVariant(_D64, 256),
    "bf16 64 prefill window sinks": AttentionVariant(_D64, 256, group=8, window=128, has_sinks=True),
    "bf16 96 prefill": AttentionVariant(_D96, 256),
    "bf16 128 decode": AttentionVariant(_D128, 1),
    "bf16 128 decode 16 queries": AttentionVariant(_D128, 16, group=2),
    "bf16 128 decode group 128": AttentionVariant(_D128, 1, group=128),
    "bf16 128 prefill": AttentionVariant(_D128, 256),
    "bf16 192/128 prefill": AttentionVariant((192, 128), 256),
    "bf16 256 decode": AttentionVariant(_D256, 1),
    "bf16 256 prefill": AttentionVariant(_D256, 256),
    "bf16 256 prefill window softcap": AttentionVariant(_D256, 256, group=2, window=4096, softcap=50.0),
    "fp16 128 prefill": AttentionVariant(_D128, 256, dtype=_FP16),
    "fp32 128 decode": AttentionVariant(_D128, 1, dtype=_FP32),
    "fp32 128 prefill": AttentionVariant(_D128, 256, dtype=_FP32),
    "fp32 256 prefill": AttentionVariant(_D256, 256, dtype=_FP32),
}
SPLIT_VARIANTS = {
    "bf16 128 decode, 16 splits": AttentionVariant(_D128, 1, num_splits=16),
    "bf16 256 decode, 64 splits": AttentionVariant(_D256, 1, num_splits=64, has_sinks=True),
}


def cases() -> tuple[Case, ...]:
    """Return the variants of the table: dtypes, head sizes, decode, prefill, every optional feature once."""
    found = [
        Case("step 256 tokens", _step_case(256, 640, with_extra=False)),
        Case("step 8192 tokens, lengths on the device", _step_case(8192, 8192, with_extra=True)),
    ]
    found += [Case(name, launch) for name, launch in copy_launches().items()]
    for name, variant in (ATTENTION_VARIANTS | SPLIT_VARIANTS).items():
        found += [Case(f"{launch.name} {name}", launch) for launch in variant.prepare()]
    found += [Case(name, launch) for name, launch in (recurrent_launches() | matrix_state_launches()).items()]
    found += [Case(name, launch) for name, launch in page_index_launches().items()]
    return tuple(found)


def _nvidia_figures(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers with spill bytes, from ptxas's own report."""
    name = "ptxas-blackwell" if arch >= 90 else "ptxas"
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    sm = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if sm is None:
        raise ValueError("ptx: expected a .target line, got none; the compiler's output format has changed")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={sm.group(1)}", str(source), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(count) for count in re.findall(r"Used (\d+) registers", report))
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return registers, sum(int(count) for count in spills)


def _amd_figures(assembly: str) -> tuple[int, int]:
    """Return VGPRs with spill bytes, from the kernel's metadata."""
    registers = [int(count) for count in re.findall(r"\.vgpr_count:\s+(\d+)", assembly)]
    spills = [int(count) for count in re.findall(r"\.vgpr_spill_count:\s+(\d+)", assembly)]
    return max(registers), 4 * sum(spills)


def compile_case(case: Case, target_name: str) -> Row:
    """Compile one variant for one target.

    Raises: RuntimeError under TRITON_INTERPRET=1, where nothing can be compiled.
    """
    launch = case.launch
    if is_interpreted(launch.kernel):
        raise RuntimeError(
            "TRITON_INTERPRET: expected unset, got set; unset it, since the interpreter compiles nothing"
        )
    target = TARGETS[target_name]
    triton.runtime.driver.set_active(_StubDriver(target))
    # The cache of compiled variants is per device number, which the stub reuses for every target.
    launch.kernel.device_caches.clear()  # type: ignore[attr-defined]
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)  # type: ignore[attr-defined]
    if target.backend == "cuda":
        registers, spill_bytes = _nvidia_figures(compiled.asm["ptx"], target.arch)
    else:
        registers, spill_bytes = _amd_figures(compiled.asm["amdgcn"])
    metadata = compiled.metadata
    return Row(case.name, target_name, registers, spill_bytes, int(metadata.shared), int(metadata.num_warps))


def compile_all(only: str, target_names: Sequence[str]) -> list[Row]:
    """Compile the variants whose name contains `only` for the given targets, one process a target on as many cores."""
    if len(target_names) == 1:
        return compile_for(only, target_names[0])
    with ProcessPoolExecutor(min(len(target_names), os.cpu_count() or 1), get_context("spawn")) as pool:
        by_target = list(pool.map(compile_for, [only] * len(target_names), target_names))
    return [row for rows in zip(*by_target, strict=True) for row in rows]


def compile_for(only: str, target_name: str) -> list[Row]:
    """Compile the variants whose name contains `only` for one target."""
    return [compile_case(case, target_name) for case in cases() if only in case.name]


def format_table(rows: Sequence[Row]) -> str:
    """Render a Markdown table: one line a variant, one column a target."""
    target_names = list(dict.fromkeys(row.target for row in rows))
    lines = ["| kernel | warps | " + " | ".join(target_names) + " |", "|---" * (2 + len(target_names)) + "|"]
    for name in dict.fromkeys(row.case for row in rows):
        found = {row.target: row for row in rows if row.case == name}
        cells = [f"{row.registers} / {row.spill_bytes} / {row.shared_bytes:,}" for row in found.values()]
        lines.append(f"| {name} | {next(iter(found.values())).num_warps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_docs(rows: Sequence[Row]) -> None:
    """Replace the table between the two markers of docs/kernels.md."""
    before, rest = DOCS.read_text().split(TABLE_BEGIN)
    after = rest.split(TABLE_END)[1]
    DOCS.write_text(f"{before}{TABLE_BEGIN}\n{format_table(rows)}\n{TABLE_END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where `--check` finds spills beyond the allowance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="compile the variants whose name contains this text")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 if a kernel spills beyond its allowance")
    parser.add_argument("--write-docs", action="store_true", help="regenerate the table in docs/kernels.md")
    arguments = parser.parse_args(argv)
    if arguments.write_docs and (arguments.only or arguments.targets != list(TARGETS)):
        parser.error("--write-docs: expected all kernels for all targets, got a subset; drop --only, --targets")
    if not any(arguments.only in case.name for case in cases()):
        parser.error(f"--only: expected part of a variant's name, got {arguments.only!r}; run without it to list all")
    rows = compile_all(arguments.only, arguments.targets)
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else format_table(rows))
    if arguments.write_docs:
        write_docs(rows)
    refused = [row for row in rows if not row.is_allowed]
    if arguments.check and refused:
        print("\n".join(f"spills beyond the allowance: {row}" for row in refused), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
