"""Layer specs: what every layer of a model keeps between steps.

    ModelSpec
      layers: LayerSpec (one per layer, in order)
        caches: LayerCache (none for an MLP, two for a layer with attention and a state)
          lifecycle: which tokens it must still hold
          tensors:   what it stores, per token or per sequence
        or shares_kv_with: it reads another layer's cache

Every model is frozen and strict; unknown fields are refused. A wrong value gives a `pydantic.ValidationError`
(a `ValueError`) whose lines say the value, the rule and what to do; `ModelSpec.from_json` turns that into a
`SpecError` of one line per problem.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hybridkv.errors import SpecError
from hybridkv.spec_base import Frozen, fail, readable_errors

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
Dtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
StateFamily = Literal["mamba1", "mamba2", "gated_delta_net", "kda", "lightning", "short_conv", "rglru"]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]


class FullAttention(Frozen):
    """Every token of the sequence stays: position p sees `0..p`."""

    kind: Literal["full_attention"] = "full_attention"


class SlidingWindow(Frozen):
    """The last `window` tokens stay, the current one counted: position p sees `max(0, p-window+1)..p`."""

    fixes: ClassVar[dict[str, str]] = {"window": "use full_attention for a layer without a window"}
    kind: Literal["sliding_window"] = "sliding_window"
    window: PositiveInt


class ChunkedAttention(Frozen):
    """Tokens of the current chunk stay: position p sees `(p // chunk) * chunk..p`."""

    fixes: ClassVar[dict[str, str]] = {"chunk": "use full_attention for a layer without chunks"}
    kind: Literal["chunked_attention"] = "chunked_attention"
    chunk: PositiveInt


class CrossAttention(Frozen):
    """The source's tokens stay: written once, never grown."""

    fixes: ClassVar[dict[str, str]] = {"max_source_tokens": "give the longest source the encoder produces"}
    kind: Literal["cross_attention"] = "cross_attention"
    max_source_tokens: PositiveInt


class State(Frozen):
    """A fixed number of bytes a sequence stays: a recurrent state, updated in place."""

    kind: Literal["state"] = "state"
    family: StateFamily


Lifecycle = Annotated[
    FullAttention | SlidingWindow | ChunkedAttention | CrossAttention | State, Field(discriminator="kind")
]


class CacheTensor(Frozen):
    """One tensor of a layer cache.

    Shapes:
        per_token:    `shape` is what one token stores, such as `[num_kv_heads, head_dim]`
        per_sequence: `shape` is what one sequence stores, such as `[conv_channels, K-1]`

    `rotary_elements` are the last elements of a latent, which carry rotary positions: an 8-bit cache keeps them apart.
    """

    fixes: ClassVar[dict[str, str]] = {
        "shape": "give at least one dimension, each at least 1",
        "tokens_per_entry": "1 stores every token, n one entry for n tokens",
        "rotary_elements": "leave it out for a tensor without rotary elements",
    }
    name: Annotated[str, Field(min_length=1)]
    kind: Literal["per_token", "per_sequence"] = "per_token"
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1, strict=False)]
    dtype: Dtype
    tokens_per_entry: PositiveInt = 1
    rotary_elements: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_rotary(self) -> "CacheTensor":
        if self.rotary_elements is not None and self.rotary_elements >= self.shape[-1]:
            fail(
                "rotary_elements",
                f"got {self.rotary_elements}, the entry has {self.shape[-1]} elements",
                "give the rotary ones alone",
            )
        return self

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: of one token, of `tokens_per_entry` tokens, or of one sequence."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class LayerCache(Frozen):
    """What one layer keeps: a lifecycle with its tensors, or another layer's cache."""

    fixes: ClassVar[dict[str, str]] = {"shares_kv_with": "give the index of an earlier layer that owns its cache"}
    lifecycle: Lifecycle
    tensors: Annotated[tuple[CacheTensor, ...], Field(strict=False)] = ()
    shares_kv_with: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_tensors(self) -> "LayerCache":
        if self.shares_kv_with is not None:
            if self.tensors:
                fail(
                    "tensors", "must be empty where shares_kv_with is set: a sharing layer owns no bytes", "remove one"
                )
            return self
        if not self.tensors:
            fail("tensors", "a layer cache holds at least one tensor", "add a tensor or remove the cache")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) < len(names):
            fail("tensors", f"tensor names {names} must differ", "rename one")
        expected = "per_sequence" if self.lifecycle.kind == "state" else "per_token"
        for tensor in self.tensors:
            if tensor.kind != expected:
                fail(
                    "tensors",
                    f"{tensor.name!r} is {tensor.kind}, lifecycle {self.lifecycle.kind} wants {expected}",
                    "change the tensor's kind or the lifecycle",
                )
        return self

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token adds to this cache; 0 for a state or a shared cache."""
        return sum(t.entry_bytes / t.tokens_per_entry for t in self.tensors if t.kind == "per_token")

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes one sequence needs whatever its length; 0 for a cache that holds tokens."""
        return sum(t.entry_bytes for t in self.tensors if t.kind == "per_sequence")


class LayerSpec(Frozen):
    """One layer: its index and its caches, none for an MLP."""

    layer: Annotated[int, Field(ge=0)]
    caches: Annotated[tuple[LayerCache, ...], Field(strict=False)] = ()


class ModelSpec(Frozen):
    """Every layer of a model, in order.

    Raises (on construction): pydantic.ValidationError for a missing, duplicate or misplaced layer, a dangling or
        cyclic `shares_kv_with`, a share between unlike lifecycles, or a model without any cache.
    """

    fixes: ClassVar[dict[str, str]] = {"layers": "list every layer in order, from 0"}
    name: Annotated[str, Field(min_length=1)]
    model_type: Annotated[str, Field(min_length=1)]
    max_model_len: PositiveInt | None = None
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1, strict=False)]

    @field_validator("layers")
    @classmethod
    def _check_order(cls, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        for expected, layer in enumerate(layers):
            if layer.layer != expected:
                seen = "a duplicate" if layer.layer in range(expected) else "out of order"
                fail(
                    "layers", f"layer {layer.layer} at position {expected} is {seen}", "number the layers 0, 1, 2, ..."
                )
        return layers

    @model_validator(mode="after")
    def _check_shares(self) -> "ModelSpec":
        for layer in self.layers:
            for cache in layer.caches:
                if cache.shares_kv_with is not None:
                    _check_share(self.layers, layer.layer, cache)
        if not any(cache.tensors for layer in self.layers for cache in layer.caches):
            fail("layers", "no layer owns a cache", "a model without caches needs no cache manager")
        return self

    def with_layers(self, layers: tuple[LayerSpec, ...]) -> "ModelSpec":
        """Return the model with other layers, validated again."""
        return ModelSpec(name=self.name, model_type=self.model_type, max_model_len=self.max_model_len, layers=layers)

    def owned_caches(self) -> Iterator[tuple[int, int, LayerCache]]:
        """Yield `(layer, cache index, cache)` for every cache that owns bytes, in layer order."""
        for layer in self.layers:
            for cache_idx, cache in enumerate(layer.caches):
                if cache.shares_kv_with is None:
                    yield layer.layer, cache_idx, cache

    @cached_property
    def distinct_caches(self) -> tuple[tuple[LayerCache, int], ...]:
        """Caches that own bytes, each once with the number of layers that keep an equal one, in layer order."""
        return tuple(Counter(cache for _, _, cache in self.owned_caches()).items())

    @property
    def num_layers(self) -> int:
        """Number of layers, those without caches included."""
        return len(self.layers)

    def to_json(self) -> str:
        """Return the spec as JSON with one layer a line."""
        head = self.model_dump(mode="json", exclude={"layers"}, exclude_none=True)
        layers = ",\n  ".join(layer.model_dump_json(exclude_none=True) for layer in self.layers)
        fields = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        return f'{{\n{fields} "layers": [\n  {layers}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "model spec") -> "ModelSpec":
        """Parse a spec written by `to_json`.

        Raises: SpecError with one line per problem: field, value, rule, fix.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise SpecError("\n".join(f"{source}: {line}" for line in readable_errors(error))) from None

    @classmethod
    def load(cls, name_or_path: str | Path) -> "ModelSpec":
        """Load a spec from a JSON file, or by name from the specs that ship with the package.

        Raises: SpecError if there is neither such a file nor such a name, or the spec is wrong.
        """
        path = Path(name_or_path)
        if path.is_file():
            return cls.from_json(path.read_bytes(), str(path))
        known = _shipped_specs()
        if str(name_or_path) not in known:
            names = ", ".join(sorted(known))
            raise SpecError(f"model {str(name_or_path)!r}: no such file and no such name; known names: {names}")
        return cls.from_json(known[str(name_or_path)].read_bytes(), str(name_or_path))


def known_models() -> list[str]:
    """Return the names of the specs that ship with the package, sorted."""
    return sorted(_shipped_specs())


def _shipped_specs() -> dict[str, Path]:
    package = Path(__file__).parent
    installed, checkout = package / "model_configs", package.parent / "model_configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in folder.glob("*.json")}


def _check_share(layers: tuple[LayerSpec, ...], layer_idx: int, cache: LayerCache) -> None:
    target_idx = cache.shares_kv_with
    field = f"layers[{layer_idx}].caches.shares_kv_with"
    if target_idx is None or target_idx >= len(layers):
        fail(
            field,
            f"got {target_idx}, the model has layers 0..{len(layers) - 1}",
            "point it at a layer that owns its cache",
        )
    elif target_idx >= layer_idx:
        fail(
            field,
            f"got {target_idx}, must be an earlier layer: a cycle or a forward share has no owner",
            "point it at an earlier layer that owns its cache",
        )
    else:
        kinds = [owner.lifecycle for owner in layers[target_idx].caches if owner.shares_kv_with is None]
        if not kinds:
            fail(field, f"got {target_idx}, which owns no cache itself", "point it at the layer that owns the bytes")
        if cache.lifecycle not in kinds:
            fail(
                field,
                f"got {target_idx} of lifecycle {[k.kind for k in kinds]}, must equal {cache.lifecycle!r}",
                "share only between layers of one lifecycle",
            )
