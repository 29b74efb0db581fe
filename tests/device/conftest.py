"""Device tests: kernels are interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

# Triton chooses when it decorates: this line must run before any kernel module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Return the device on which the kernels of this run work."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
