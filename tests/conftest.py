"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before any kernel is imported."""

import os

import pytest
import torch

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
