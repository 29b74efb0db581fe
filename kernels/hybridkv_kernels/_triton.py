"""The only module that imports triton.

Without triton the `jit` decorator returns the plain function, so contracts, checks and references import and run; a
launch then raises ImportError. Kernel modules postpone the evaluation of annotations for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

_P = ParamSpec("_P")
_R = TypeVar("_R")

KernelArg: TypeAlias = "torch.Tensor | int | float | None"
Grid: TypeAlias = tuple[int, int, int]

__all__ = [
    "Grid",
    "KernelArg",
    "Launch",
    "constant",
    "has_triton",
    "is_interpreted",
    "jit",
    "next_power_of_2",
    "tl",
    "triton",
]


def has_triton() -> bool:
    """Tell whether triton is installed; a launch raises ImportError where it is not."""
    return triton is not None


def is_interpreted(kernel: object) -> bool:
    """Tell whether `kernel` was decorated under TRITON_INTERPRET=1, so that it takes CPU tensors."""
    return type(kernel).__name__ == "InterpretedFunction"


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Apply `triton.jit`, or return the function untouched where triton is not installed."""
    if triton is None:
        return function
    return cast("Callable[_P, _R]", triton.jit(function))


def constant(value: int) -> int:
    """Return what a kernel may read as a module's constant; a change of it compiles the kernel anew."""
    return value if tl is None else cast("int", tl.constexpr(int(value)))


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Launch:
    """One prepared kernel launch: what the launchers run is also what the offline compiler compiles.

    `options` holds the constexpr arguments and compile options (`num_warps`, `num_stages`).
    """

    name: str
    kernel: object
    grid: Grid
    args: tuple[KernelArg, ...]
    options: Mapping[str, int | float | bool]

    def run(self) -> None:
        """Launch on the current stream of the tensors' device; an empty grid launches nothing.

        Raises: ImportError without triton; ValueError if a tensor is on the CPU in compiled mode.
        """
        if triton is None:
            raise ImportError(
                f"{self.name} needs triton, which is not installed: expected `import triton` to work, got "
                "ImportError; install triton or call the reference of this op"
            )
        if 0 in self.grid:
            return
        tensors = [arg for arg in self.args if hasattr(arg, "device")]
        on_cpu = next((arg for arg in tensors if cast("torch.Tensor", arg).device.type == "cpu"), None)
        if on_cpu is not None and not is_interpreted(self.kernel):
            raise ValueError(
                f"{self.name}: expected tensors on a GPU, got a tensor on the CPU; use the CPU path of this op, or "
                "set TRITON_INTERPRET=1 before importing hybridkv_kernels"
            )
        if tensors and on_cpu is None:
            import torch

            # A launch goes to the current device, whatever the device of its pointers.
            with torch.cuda.device(cast("torch.Tensor", tensors[0]).device):
                self.kernel[self.grid](*self.args, **self.options)  # type: ignore[index]
            return
        self.kernel[self.grid](*self.args, **self.options)  # type: ignore[index]
