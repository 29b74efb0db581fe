"""Claims about imports of the kernels package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE_ROOT = Path(__file__).resolve().parents[2] / "kernels"

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from hybridkv_kernels._triton import has_triton
from hybridkv_kernels.kv_write import write_kv, write_kv_reference, write_kv_torch
from hybridkv_kernels import paged_attention, step_tables
assert not has_triton()
key, cache, slots = torch.ones(1, 1, 4), torch.zeros(2, 2, 1, 4), torch.tensor([3])
write_kv_reference(key, key, cache, cache, slots)
write_kv_torch(key, key, cache, cache, slots)
assert cache.sum() == 4
from hybridkv_kernels.rg_lru import rg_lru, rg_lru_reference, rg_lru_torch
from hybridkv_kernels.state_batch import StateBatch
slot, zero = torch.tensor([1]), torch.tensor([False])
batch = StateBatch(torch.tensor([0, 1], dtype=torch.int32), slot, slot, zero, max_query_len=1)
ones = torch.ones(1, 4)
recurrence = {"state": torch.zeros(2, 4), "batch": batch, "out": torch.empty(1, 4)}
rg_lru_reference(ones, ones, **recurrence)
rg_lru_torch(ones, ones, **recurrence)
assert recurrence["out"].sum() == 8
from hybridkv_kernels.group_meta import NUM_META_COLUMNS
from hybridkv_kernels.step_layout import HEADER_WORDS, NUM_INDEX_COLUMNS
from hybridkv_kernels.step_tables import StepOutputs, step, step_reference
words, staging = torch.zeros(8, dtype=torch.int32), torch.zeros(HEADER_WORDS, dtype=torch.int32)
metas = torch.zeros(1, NUM_META_COLUMNS, dtype=torch.int64), torch.zeros(1, NUM_INDEX_COLUMNS, dtype=torch.int64)
metas[1][:] = -1
sizes = [(1,), (2,), (1,), (1,), (1,), (1,), (1, 1), (0, 1), (1,)]
dtypes = [torch.int32] * 3 + [torch.bool, torch.int32, torch.int64, torch.int64, torch.int64, torch.int32]
outputs = StepOutputs(*(torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)))
step_reference(words.numpy(), *(meta.numpy() for meta in metas), staging.numpy(), None, out=outputs.arrays())
assert outputs.slots.item() == outputs.rows.item() == -1
launches = (
    lambda: write_kv(key, key, cache, cache, slots),
    lambda: rg_lru(ones, ones, **recurrence),
    lambda: step(words, *metas, staging, None, out=outputs, num_rows=1),
)
for launch in launches:
    try:
        launch()
    except ImportError as error:
        assert "triton" in str(error)
    else:
        raise SystemExit("a launch without triton did not raise")
"""
WITHOUT_TORCH = """
import sys
import hybridkv_kernels.constants, hybridkv_kernels.group_meta, hybridkv_kernels.step_layout
import hybridkv_kernels.step_numpy, hybridkv_kernels.step_reference
assert "torch" not in sys.modules and "triton" not in sys.modules
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that can import the kernels package."""
    program = f"import sys; sys.path.insert(0, {str(SOURCE_ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_references_run_without_triton() -> None:
    """Every module imports, references run, a launch raises ImportError where triton is not installed."""
    result = run(WITHOUT_TRITON)
    assert result.returncode == 0, result.stderr


def test_host_modules_load_no_torch() -> None:
    """Constants, layouts, the host step and its reference import neither torch nor triton."""
    result = run(WITHOUT_TORCH)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted((SOURCE_ROOT / "hybridkv_kernels").glob("*.py")), ids=lambda path: path.name)
def test_only_one_module_imports_triton(path: Path) -> None:
    """No module but `_triton` imports triton, none imports the host library."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    imports = [line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))]
    assert "hybridkv" not in imports
    assert path.name == "_triton.py" or "triton" not in imports


def test_source_root_is_no_package() -> None:
    """`kernels/` stays a source root: a package there would shadow the PyPI package of that name."""
    assert not (SOURCE_ROOT / "__init__.py").exists()
