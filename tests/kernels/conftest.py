"""Kernel tests: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def checked_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter raise where 32-bit arithmetic of a kernel overflows; compiled kernels run unchecked."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    monkeypatch.setattr(interpreter_builder, "options", InterpreterOptions(debug=True))
