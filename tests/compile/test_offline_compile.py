"""Claims about what the kernels compile to, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def compile_kernels(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the compile script in a new process: the interpreter of this one would leak into the compiler."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {
        "PYTHONPATH": str(ROOT / "kernels"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TRITON_DEFAULT_FP_FUSION": "1",
        **variables,
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("only", "targets", "num_rows"),
    [
        ("step 256 tokens", ("sm_80", "sm_90", "sm_100", "gfx942"), 4),
        ("copy_blocks int32", ("sm_80", "sm_90", "sm_100", "gfx942"), 4),
        ("write_kv e4m3fn 128 scale tensor", ("sm_80", "gfx942"), 2),
        ("write_kv bf16 192/128", ("sm_90", "gfx942"), 2),
        ("bf16 128 decode, 16 splits", ("sm_90", "gfx942"), 4),
        ("paged_attention bf16 128 prefill", ("sm_80",), 1),
        ("causal_conv1d bf16 2048 kernel 3 prefill", ("sm_90", "gfx942"), 2),
        ("selective_scan bf16 8192 prefill", ("sm_100",), 1),
        ("mamba2_scan bf16 64x128 decode", ("sm_90",), 1),
        ("gated_delta_rule bf16 128x128 per channel decode", ("sm_80",), 1),
    ],
)
def test_kernels_compile_without_spills(only: str, targets: tuple[str, ...], num_rows: int, tmp_path: Path) -> None:
    """A sample of the table compiles for NVIDIA, for AMD, spilling no register."""
    result = compile_kernels(tmp_path, "--json", "--check", "--only", only, "--targets", *targets)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == num_rows
    assert {row["target"] for row in rows} == set(targets)
    assert all(row["spill_bytes"] == 0 and 0 < row["registers"] <= 512 for row in rows)


def test_interpreted_kernels_are_not_compiled(tmp_path: Path) -> None:
    """Under TRITON_INTERPRET=1 the script says what to unset in place of printing figures."""
    result = compile_kernels(tmp_path, "--only", "step", TRITON_INTERPRET="1")
    assert result.returncode != 0
    assert "TRITON_INTERPRET: expected unset" in result.stderr


def test_unknown_variant_is_refused(tmp_path: Path) -> None:
    """A filter that matches nothing is an error, not an empty success."""
    result = compile_kernels(tmp_path, "--only", "no such kernel", "--check")
    assert result.returncode == 2
    assert "--only" in result.stderr
