"""Runner tests: tiny matrices are slower, and much noisier, on many threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Compute on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
