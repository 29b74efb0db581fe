"""Claims about the source tree: who imports whom, what loads what, how large files are."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("hybridkv/**/*.py"), *ROOT.glob("kernels/hybridkv_kernels/**/*.py")])

# A module imports modules of the rows above it, of its own row only within one package.
ROWS = (
    "hybridkv_kernels",
    "hybridkv.errors",
    "hybridkv.units",
    "hybridkv._torch",
    "hybridkv.spec_base",
    "hybridkv.specs",
    "hybridkv.options",
    "hybridkv.hf_config",
    "hybridkv.retention",
    "hybridkv.grouping",
    "hybridkv.limits",
    "hybridkv.plan",
    "hybridkv.slab_search",
    "hybridkv.planner",
    "hybridkv.ranks",
    "hybridkv.layouts",
    "hybridkv.change_log",
    "hybridkv.table_arrays",
    "hybridkv.block_table",
    "hybridkv.row_operations",
    "hybridkv.step_batch",
    "hybridkv.staging",
    "hybridkv.free_stacks",
    "hybridkv.slabs",
    "hybridkv.drain_queue",
    "hybridkv.pool_state",
    "hybridkv.pool_check",
    "hybridkv.slab_exchange",
    "hybridkv.block_pool",
    "hybridkv.capacity",
    "hybridkv.lengths",
    "hybridkv.token_hash",
    "hybridkv.index_layout",
    "hybridkv.node_arrays",
    "hybridkv.node_table",
    "hybridkv.block_owners",
    "hybridkv.prefix_trunk",
    "hybridkv.trunk_order",
    "hybridkv.eviction",
    "hybridkv.resume_points",
    "hybridkv.resume_builder",
    "hybridkv.prefix_match",
    "hybridkv.index_check",
    "hybridkv.index_eviction",
    "hybridkv.resume_policy",
    "hybridkv.prefix_index",
    "hybridkv.cache_events",
    "hybridkv.index_events",
    "hybridkv.row_lengths",
    "hybridkv.group_arrays",
    "hybridkv.copy_list",
    "hybridkv.block_lender",
    "hybridkv.prefix_recorder",
    "hybridkv.sequence_store",
    "hybridkv.compaction",
    "hybridkv.admission",
    "hybridkv.admitting",
    "hybridkv.growing",
    "hybridkv.branching",
    "hybridkv.drafts",
    "hybridkv.swapping",
    "hybridkv.cache_metrics",
    "hybridkv.manager_view",
    "hybridkv.manager_core",
    "hybridkv.manager",
    "hybridkv.sanitizer",
    "hybridkv.replay",
    "hybridkv.batch",
    "hybridkv.chunk_rows",
    "hybridkv.page_index",
    "hybridkv.step_path",
    "hybridkv.multi_group",
    "hybridkv.arena",
    "hybridkv.attention",
    "hybridkv.runner",
    "hybridkv.report",
    "hybridkv.cli",
    "hybridkv.__main__",
)
HEAVY = ("torch", "transformers", "triton", "matplotlib", "tokenizers", "safetensors")
FIRST_WITH_TORCH = ROWS.index("hybridkv.batch")


def module_name(path: Path) -> str:
    """A file's dotted module name."""
    base = ROOT / "kernels" if "hybridkv_kernels" in path.parts else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def row_of(module: str) -> int | None:
    """The row of a module of ours; None for modules of others and for the package itself."""
    return next((idx for idx, name in enumerate(ROWS) if f"{module}.".startswith(f"{name}.")), None)


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, those of its type checking blocks too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            is_package = node.module == "hybridkv"
            found |= {f"hybridkv.{alias.name}" for alias in node.names} if is_package else {str(node.module)}
    return found


def top_level_imports(path: Path) -> set[str]:
    """Modules that importing a file imports, by their first name."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names | {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}}


def run_python(code: str) -> str:
    """Run code in a new interpreter started at the root, and return what it printed."""
    prefix = "import sys; sys.path.insert(0, 'kernels')\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


by_file = pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])


def test_the_tree_is_found() -> None:
    """The checks below see the library's files and the kernels'."""
    names = {module_name(path) for path in FILES}
    assert {"hybridkv", "hybridkv.manager", "hybridkv.attention.base", "hybridkv_kernels.step_tables"} <= names


@by_file
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only modules above it in the table of the design; kernels import nothing of the library."""
    module = module_name(path)
    if module == "hybridkv":
        return
    mine = row_of(module)
    assert mine is not None, f"{module} is in no row"
    for imported in imports(path):
        theirs = row_of(imported)
        if theirs is None:
            ours = imported.split(".")[0] in ("hybridkv", "kernels", "tests")
            assert not ours or (imported == "hybridkv" and "cli" in path.parts), f"{module} imports {imported}"
            continue
        same_package = theirs == mine and path.parent != ROOT / "hybridkv"
        assert theirs < mine or same_package, f"{module} imports {imported}"


@by_file
def test_the_host_half_names_no_heavy_package(path: Path) -> None:
    """Specs to replay import neither torch nor any package that needs it, not even late."""
    row = row_of(module_name(path))
    if row is None or row == 0 or row >= FIRST_WITH_TORCH or module_name(path) == "hybridkv._torch":
        return
    named = {name.split(".")[0] for name in imports(path)}
    assert not named & set(HEAVY)
    assert "hybridkv._torch" not in imports(path)


@by_file
def test_torch_is_imported_in_one_place(path: Path) -> None:
    """In the library only `_torch` imports torch, so that its absence always gives the same error."""
    if module_name(path).startswith("hybridkv_kernels") or module_name(path) == "hybridkv._torch":
        return
    assert "torch" not in {name.split(".")[0] for name in top_level_imports(path)}


@by_file
def test_triton_is_imported_in_one_place(path: Path) -> None:
    """Only the kernels' `_triton` imports triton."""
    if module_name(path) != "hybridkv_kernels._triton":
        assert "triton" not in {name.split(".")[0] for name in imports(path)}


@by_file
def test_files_are_short(path: Path) -> None:
    """No file has more than 400 lines."""
    assert len(path.read_text().splitlines()) <= 400


@by_file
def test_nothing_is_any(path: Path) -> None:
    """No type is `Any`."""
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert "Any" not in names | attributes


@by_file
def test_public_names_have_docstrings(path: Path) -> None:
    """Every module says what it is for, and so do the public classes, functions and methods of public modules."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    is_private = path.name.startswith("_") and not path.name.startswith("__")
    todo: list[ast.AST] = [] if is_private else [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    todo.append(node)


@by_file
def test_no_environment_is_read(path: Path) -> None:
    """Results depend on no environment variable; one says whether the compiled helper computes them."""
    if module_name(path).startswith("hybridkv.cli") or module_name(path) == "hybridkv_kernels.host":
        return
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not attributes & {"environ", "getenv"}


def test_the_import_loads_nothing_heavy() -> None:
    """`import hybridkv` and every module of the host half leave torch, triton and transformers unloaded."""
    host = [
        module_name(path)
        for path in FILES
        if (row := row_of(module_name(path))) is not None and 0 < row < FIRST_WITH_TORCH
    ]
    modules = sorted(set(host) - {"hybridkv._torch", "hybridkv.hf_config.__main__"})
    assert "hybridkv.manager" in modules
    code = f"import hybridkv\nfor name in {modules}: __import__(name)\n"
    code += f"print(sorted(set({HEAVY}) & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


WITHOUT_TORCH = """
import importlib.abc

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import hybridkv
for name in ("batch", "page_index", "step_path", "multi_group", "arena", "attention"):
    try:
        __import__(f"hybridkv.{name}")
    except ImportError as error:
        assert "pip install 'hybridkv[torch]'" in str(error), str(error)
        print(name)
"""


def test_without_torch_the_error_names_the_extra() -> None:
    """Where torch is missing the host half works, and what maps slots and attends says which extra to install."""
    names = ["batch", "page_index", "step_path", "multi_group", "arena", "attention"]
    assert run_python(WITHOUT_TORCH).split() == names


def test_the_kernels_folder_is_no_package() -> None:
    """`kernels/` is a source root: it has no `__init__.py`, and from the root no module `kernels` is in it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = """
import importlib.util
spec = importlib.util.find_spec("kernels")
print(spec.origin if spec else None)
"""
    assert not run_python(code).strip().startswith(str(ROOT))


def test_transformers_imports_at_the_root() -> None:
    """A transformers model class imports in an interpreter started at the root, where `kernels/` is in sight."""
    pytest.importorskip("transformers")
    assert importlib.util.find_spec("transformers") is not None
    code = "from transformers import Gemma3ForCausalLM\nprint(Gemma3ForCausalLM.__name__)"
    assert run_python(code).strip() == "Gemma3ForCausalLM"
