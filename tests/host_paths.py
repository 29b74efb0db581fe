"""The two ways in which the host works on tables: the compiled helper, numpy alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from hybridkv_kernels import host

PATHS = ("native", "numpy")


@contextmanager
def using(path: str) -> Iterator[None]:
    """Let tables that are made inside take one path; skip the test where the helper was not built."""
    if path == "native" and not host.is_built():
        pytest.skip("the compiled helper was not built")
    with mock.patch.dict(os.environ, {host.VARIABLE: "1" if path == "native" else "0"}):
        yield
