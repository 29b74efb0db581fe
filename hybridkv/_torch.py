"""The one place that imports torch for the library, so that its absence gives a useful error."""

try:
    import torch
except ImportError as error:  # pragma: no cover - exercised in a clean environment
    raise ImportError(
        "this part of hybridkv needs PyTorch: install it with `pip install 'hybridkv[torch]'` "
        "(planning, specs and the block manager work without it)"
    ) from error

__all__ = ["torch"]
