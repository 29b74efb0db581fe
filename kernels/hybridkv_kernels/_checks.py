"""Shape and dtype errors with one wording for all ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def expect(condition: bool, name: str, expected: object, got: object) -> None:
    """Raise ValueError naming the argument, what was expected, what was given, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def expect_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype | None, shape: Sequence[int | None]) -> None:
    """Check dtype (None: any) with shape (None: any size in that dimension) without a device sync."""
    if dtype is not None:
        expect(tensor.dtype == dtype, f"{name}.dtype", dtype, tensor.dtype)
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    expect(fits, f"{name}.shape", list(shape), list(tensor.shape))


def expect_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Check that a tensor has one of some dtypes."""
    expect(tensor.dtype in dtypes, f"{name}.dtype", " or ".join(map(str, dtypes)), tensor.dtype)


def expect_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that neighbours in the last dimension are neighbours in memory."""
    ok = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    expect(ok, f"{name}.stride(-1)", 1, tensor.stride(-1))


def expect_one_device(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that all tensors live where the first one does."""
    first_name, first = named[0]
    for name, tensor in named[1:]:
        expect(tensor.device == first.device, f"{name}.device", f"{first.device} (as {first_name})", tensor.device)
