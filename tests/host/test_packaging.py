"""The wheel: what it holds, and that it works where nothing else is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder, sources, *options, **variables):
    """Build the project from a copy of its sources; return the file."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("hybridkv", "kernels", "model_configs"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "build", *options, "--outdir", str(folder), str(sources)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | variables)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel."""
    return build(tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sources"), "--wheel")


def test_the_wheel_holds_every_module_and_every_spec(wheel):
    """Each module, type marker and model spec of the sources is in the wheel, tests and benchmarks are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "hybridkv").rglob("*.py")}
    expected |= {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.py")}
    expected |= {f"hybridkv/model_configs/{path.name}" for path in (ROOT / "model_configs").glob("*.json")}
    expected |= {"hybridkv/py.typed", "hybridkv_kernels/py.typed"}
    expected |= {f"hybridkv_kernels/{path.name}" for path in (ROOT / "kernels").rglob("*.pyi")}
    assert expected <= names
    assert {Path(name).suffix for name in names} <= {"", ".py", ".pyi", ".typed", ".json", ".so", ".txt"}
    assert {name.split("/")[0] for name in names} == {"hybridkv", "hybridkv_kernels", "hybridkv-0.1.0.dist-info"}


def helpers(wheel):
    """The compiled files of a wheel."""
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".pyd"))]


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")
def test_the_wheel_has_the_compiled_helper_for_every_python(wheel):
    """With a compiler the wheel holds the helper, in the stable ABI, and its tag says so."""
    assert helpers(wheel) == ["hybridkv_kernels/_host.abi3.so"]
    assert "-cp311-abi3-" in wheel.name


LOADS_NO_HELPER = """
import numpy as np
from hybridkv.block_table import BlockTable
from hybridkv_kernels.host import is_built
table = BlockTable(2, 4, 16)
table.append_rows(np.array([1]), np.array([2]), np.array([5, 6], dtype=np.int32))
print(is_built(), table.row_block_ids(1).tolist())
"""


@pytest.mark.full
def test_without_a_compiler_the_install_succeeds_and_numpy_works(tmp_path):
    """A source distribution holds all that is compiled; where no compiler runs its wheel has no helper and works."""
    (tmp_path / "copy").mkdir()
    sources = build(tmp_path / "sdist", tmp_path / "copy", "--sdist")
    shutil.unpack_archive(sources, tmp_path)
    unpacked = tmp_path / "hybridkv-0.1.0" / "kernels" / "hybridkv_kernels"
    compiled = {path.name for path in (ROOT / "kernels" / "hybridkv_kernels").glob("_host*.[ch]")}
    assert compiled == {path.name for path in unpacked.glob("_host*.[ch]")}
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(sources)]
    subprocess.run(command, check=True, env=os.environ | {"CC": "false"})
    assert not list(target.rglob("*.so"))
    # Without `site`, which would find this checkout where it is installed for development.
    code = f"import sys; sys.path[:0] = {[str(target), sysconfig.get_path('platlib')]}\n{LOADS_NO_HELPER}"
    done = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "False [5, 6]\n"


def test_a_clean_environment_loads_a_model_by_name(wheel, tmp_path):
    """With the base dependencies alone a shipped spec loads and plans; what needs more names its extra."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    script = """
from hybridkv import BatchLimits, ModelSpec, plan_cache
spec = ModelSpec.load("gemma-3-27b")
plan = plan_cache(spec, 80 * 2**30, BatchLimits(64, 131072, 8192))
print(spec.num_layers, len(plan.groups))
for module, extra in (("hybridkv.multi_group", "hybridkv[torch]"), ("hybridkv.runner", "hybridkv[run]")):
    try:
        __import__(module)
    except ImportError as error:
        print(extra in str(error))
"""
    done = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split("\n")[:3] == ["62 2", "True", "True"]
    version = subprocess.run([tmp_path / "venv/bin/hybridkv", "--version"], check=True, capture_output=True, text=True)
    assert version.stdout == "hybridkv 0.1.0\n"
    run = subprocess.run([tmp_path / "venv/bin/hybridkv", "run", "x", "y"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "hybridkv[run]" in run.stderr


def test_every_package_is_listed():
    """A new package folder must be added to pyproject.toml, or the wheel would miss it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "hybridkv").rglob("__init__.py")}
    assert set(settings["packages"]) == found | {"hybridkv.model_configs", "hybridkv_kernels"}


def test_model_configs_holds_nothing_but_specs():
    """Every file in model_configs/ is a model spec under its own name."""
    from hybridkv import ModelSpec

    for path in (ROOT / "model_configs").iterdir():
        assert path.suffix == ".json"
        assert ModelSpec.load(path).name == path.stem
