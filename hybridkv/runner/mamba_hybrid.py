"""Recurrent layers of Hugging Face models, Mamba-2 hybrids the first, run over cached states.

A mixer's module stays Hugging Face's: projections, gates, norms. Its `forward` runs once over the packed batch, with
the functions it calls for its convolution and its scan replaced by ours, which start every row from its own state and
write the state back. A mixer that has its recurrence inline gets a forward of ours instead.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType

from transformers import PreTrainedModel

from hybridkv._torch import torch
from hybridkv.errors import UnsupportedModel
from hybridkv.runner.caches import ForwardStep, LayerCaches, StateCache
from hybridkv.runner.mixers import MIXERS, MixerAdapter
from hybridkv.runner.recurrence import LayerRecurrence
from hybridkv_kernels.causal_conv1d import MAX_KERNEL, MIN_KERNEL

_OWN_SPEC = "make the spec from the model's own config, for one rank"
_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value")


class MixerHost:
    """The recurrent layers of a model.

    Raises (on construction): UnsupportedModel if a layer that keeps a state has no module of a known class, a module
        of a known class belongs to a layer without a state, or a state cannot be run as its spec says.
    """

    def __init__(self, model: PreTrainedModel, caches: LayerCaches) -> None:
        self._forwards: list[tuple[torch.nn.Module, Callable[..., object]]] = []
        self._recurrences: list[LayerRecurrence] = []
        found: dict[int, str] = {}
        for name, module in model.named_modules():
            adapter = MIXERS.get(type(module).__name__)
            if adapter is None:
                continue
            layer = _layer_of(name, module)
            if layer not in caches.states or layer in found:
                problem = f"is the second of layer {layer}" if layer in found else "has no state in the layer's spec"
                raise UnsupportedModel(f"{name}: {type(module).__name__} {problem}")
            found[layer] = name
            _check_states(layer, module, adapter, caches.states[layer])
            recurrence = LayerRecurrence(layer)
            self._recurrences.append(recurrence)
            self._forwards += _replaced_forwards(module, adapter, recurrence)
        missing = sorted(set(caches.states) - set(found))
        if missing:
            classes = sorted(
                {type(module).__name__ for name, module in model.named_modules() if f".{missing[0]}." in name}
            )
            raise UnsupportedModel(
                f"layers {missing}: keep a state, but no module of them is a known mixer; layer {missing[0]} has "
                f"{', '.join(classes)}; known: {', '.join(sorted(MIXERS))}"
            )

    @contextmanager
    def attached(self, step: ForwardStep) -> Iterator[None]:
        """Let the mixers use the step's states; Hugging Face's own forwards are back afterwards."""
        # A module may have a forward of its own besides its class's, as those that were moved to a device by hooks.
        before = [module.__dict__.get("forward") for module, _ in self._forwards]
        try:
            for recurrence in self._recurrences:
                recurrence.begin(step)
            for module, forward in self._forwards:
                module.__dict__["forward"] = forward
            yield
        finally:
            for (module, _), own in zip(self._forwards, before, strict=True):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own
            for recurrence in self._recurrences:
                recurrence.end()


def _check_states(layer: int, module: torch.nn.Module, adapter: MixerAdapter, cache: StateCache) -> None:
    """Raise UnsupportedModel if a layer's states are none that its module's ops advance."""
    where = f"layer {layer} ({type(module).__name__})"
    if cache.family != adapter.family or set(cache.views) != set(adapter.states):
        raise UnsupportedModel(
            f"{where}: keeps states {', '.join(sorted(adapter.states))} of kind {adapter.family}, its spec says "
            f"{', '.join(sorted(cache.views))} of kind {cache.family}; {_OWN_SPEC}"
        )
    for name, limits in adapter.states.items():
        view = cache.views[name]
        if view.dtype not in limits.dtypes:
            option = "conv_dtype" if name == "conv" else "state_dtype"
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in limits.dtypes)
            raise UnsupportedModel(
                f"{where}: state {name!r}: got {str(view.dtype).removeprefix('torch.')}, expected one of {allowed}; "
                f"make the spec with another {option}"
            )
        longest = max(view.shape[2:], default=0)
        if view.device.type != "cpu" and limits.max_gpu_dim is not None and longest > limits.max_gpu_dim:
            raise UnsupportedModel(
                f"{where}: state {name!r}: got matrices {list(view.shape[2:])}, on a GPU they may have at most "
                f"{limits.max_gpu_dim} a side; run the model on a CPU"
            )
    for conv in (part for part in module.modules() if isinstance(part, torch.nn.Conv1d)):
        _check_convolution(where, conv, cache.views["conv"])


def _check_convolution(where: str, conv: torch.nn.Conv1d, view: torch.Tensor) -> None:
    """Raise UnsupportedModel if a convolution is too long, or its state `[num_blocks, C, columns]` not its own."""
    kernel = conv.kernel_size[0]
    if not MIN_KERNEL <= kernel <= MAX_KERNEL:
        raise UnsupportedModel(
            f"{where}: convolves over {kernel} tokens, only kernels of {MIN_KERNEL} to {MAX_KERNEL} can be run"
        )
    got, expected = list(view.shape[1:]), [[conv.out_channels, columns] for columns in (kernel - 1, kernel)]
    if got not in expected:
        raise UnsupportedModel(
            f"{where}: state 'conv': got {got} in its spec, expected {' or '.join(map(str, expected))}; {_OWN_SPEC}"
        )


def _layer_of(name: str, module: torch.nn.Module) -> int:
    """Return the layer a mixer belongs to: what it says itself, else the last number in its name."""
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int) and layer >= 0:
        return layer
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise UnsupportedModel(f"{name}: {type(module).__name__} does not say which layer it is")
    return numbers[-1]


def _replaced_forwards(
    module: torch.nn.Module, adapter: MixerAdapter, recurrence: LayerRecurrence
) -> list[tuple[torch.nn.Module, Callable[..., object]]]:
    """Return the modules whose forward is replaced, with the replacement."""
    if adapter.forward is not None:
        return [(module, MethodType(_eager(_without_cache(adapter.forward, recurrence)), module))]
    own = inspect.unwrap(type(module).forward)
    functions = adapter.functions(recurrence)
    unknown = sorted(set(functions) - set(own.__globals__))
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__}: its module has no {', '.join(unknown)}; this version of transformers is not "
            "known, install transformers 5.23"
        )
    rebased = FunctionType(
        own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__
    )
    rebased.__kwdefaults__ = own.__kwdefaults__

    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        recurrence.restart()
        return rebased(self, *args, **{k: None if k in _CACHE_ARGUMENTS else v for k, v in kwargs.items()})

    return [(module, MethodType(_eager(forward), module))]


def _eager(forward: Callable[..., object]) -> Callable[..., object]:
    """Keep torch.compile out of a forward, should the caller have compiled the layers.

    It would take the forwards of all layers for one, since they share their code, and compile anew for each step.
    """
    eager: Callable[..., object] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return eager


def _without_cache(forward: Callable[..., object], recurrence: LayerRecurrence) -> Callable[..., object]:
    def replaced(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        recurrence.restart()
        return forward(recurrence, self, *args, **kwargs)

    return replaced
