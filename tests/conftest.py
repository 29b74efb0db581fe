"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before any kernel is imported."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.host_paths import PATHS, using

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # The cores are taken by the other workers; threads of their own would only wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    """Return the device on which the kernels of this run work."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def host_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the tables of a test take the compiled helper, or numpy."""
    with using(request.param):
        yield request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for `host_path`, and every function of a module with `BOTH_HOST_PATHS`, on both paths.

    What hypothesis drives draws its path.
    """
    is_plain = metafunc.cls is None and not hasattr(metafunc.function, "hypothesis")
    if getattr(metafunc.module, "BOTH_HOST_PATHS", False) and is_plain:
        metafunc.fixturenames.append("host_path")
    if "host_path" in metafunc.fixturenames:
        metafunc.parametrize("host_path", PATHS, indirect=True)
