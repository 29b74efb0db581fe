"""The wheel: what it holds, and that it works where nothing else is installed."""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy of the sources."""
    folder, sources = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("hybridkv", "kernels", "model_configs"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(sources)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_and_every_spec(wheel):
    """Each module, type marker and model spec of the sources is in the wheel, tests and benchmarks are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "hybridkv").rglob("*.py")}
    expected |= {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.py")}
    expected |= {f"hybridkv/model_configs/{path.name}" for path in (ROOT / "model_configs").glob("*.json")}
    expected |= {"hybridkv/py.typed", "hybridkv_kernels/py.typed"}
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"hybridkv", "hybridkv_kernels", "hybridkv-0.1.0.dist-info"}


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
