"""The one place that imports torch for the library, so that its absence gives a useful error."""

from math import prod

from hybridkv.units import format_bytes

try:
    import torch
except ImportError as error:  # pragma: no cover - exercised in a clean environment
    raise ImportError(
        "this part of hybridkv needs PyTorch: install it with `pip install 'hybridkv[torch]'` "
        "(planning, specs and the block manager work without it)"
    ) from error

__all__ = ["allocate_zeros", "torch"]


def allocate_zeros(what: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor.

    Raises: MemoryError with the size if it cannot be had; torch's CPU allocator says so with a RuntimeError.
    """
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        num_bytes = prod(shape) * dtype.itemsize
        raise MemoryError(f"{what}: {format_bytes(num_bytes)} cannot be allocated on {device}; ask for less") from error
