"""What every layer of a model keeps, in bytes."""

from dataclasses import dataclass, field

from hybridkv.report.document import OPTIONAL, Json, to_dict, whole
from hybridkv.specs import ChunkedAttention, CrossAttention, LayerCache, Lifecycle, ModelSpec, SlidingWindow, State
from hybridkv.units import cdiv


@dataclass(frozen=True)
class CacheTotals:
    """What all layers of a model keep together.

    Attributes:
        growing_bytes_per_token: full attention; every token of a sequence adds them.
        windowed_bytes_per_token: sliding windows and chunks; every token inside the window adds them.
        state_bytes_per_sequence: states, whatever the length.
        cross_bytes_per_sequence: cross attention, for the longest source.
    """

    growing_bytes_per_token: float
    windowed_bytes_per_token: float
    state_bytes_per_sequence: int
    cross_bytes_per_sequence: int


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a cache; `tokens_per_entry` is None where every token has its own entry."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class CacheReport:
    """One cache of a layer; what does not apply to its lifecycle is None."""

    lifecycle: str
    window: int | None = field(default=None, metadata=OPTIONAL)
    chunk: int | None = field(default=None, metadata=OPTIONAL)
    family: str | None = field(default=None, metadata=OPTIONAL)
    max_source_tokens: int | None = field(default=None, metadata=OPTIONAL)
    tensors: tuple[TensorReport, ...] = ()
    bytes_per_token: float | None = field(default=None, metadata=OPTIONAL)
    bytes_per_sequence: int | None = field(default=None, metadata=OPTIONAL)
    shares_kv_with: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class LayerReport:
    """One layer; `caches` is empty for a layer that keeps nothing."""

    layer: int
    caches: tuple[CacheReport, ...]


@dataclass(frozen=True)
class SpecReport:
    """Every layer of a model, with the totals."""

    model: str
    model_type: str
    max_model_len: int | None
    layers: tuple[LayerReport, ...]
    totals: CacheTotals

    def to_dict(self) -> dict[str, Json]:
        """Return the object that `hybridkv spec --json` prints."""
        return to_dict(self)


def spec_report(spec: ModelSpec) -> SpecReport:
    """Return what every layer of `spec` keeps."""
    layers = tuple(LayerReport(layer.layer, tuple(map(_cache_report, layer.caches))) for layer in spec.layers)
    return SpecReport(spec.name, spec.model_type, spec.max_model_len, layers, cache_totals(spec))


def cache_totals(spec: ModelSpec) -> CacheTotals:
    """Return what all layers of `spec` keep together."""
    growing, windowed, state, cross = 0.0, 0.0, 0, 0
    for _, _, cache in spec.owned_caches():
        match cache.lifecycle:
            case SlidingWindow() | ChunkedAttention():
                windowed += cache.bytes_per_token
            case State():
                state += cache.bytes_per_sequence
            case CrossAttention(max_source_tokens=longest):
                cross += sum(tensor.entry_bytes * cdiv(longest, tensor.tokens_per_entry) for tensor in cache.tensors)
            case _:
                growing += cache.bytes_per_token
    return CacheTotals(whole(growing), whole(windowed), state, cross)


def lifecycle_label(lifecycle: Lifecycle) -> str:
    """Return a lifecycle with its parameter, such as `"sliding_window 1024"`."""
    return " ".join(str(value) for value in lifecycle.model_dump().values())


def _cache_report(cache: LayerCache) -> CacheReport:
    tensors = tuple(
        TensorReport(t.name, t.shape, t.dtype, t.tokens_per_entry if t.tokens_per_entry > 1 else None)
        for t in cache.tensors
    )
    is_state = isinstance(cache.lifecycle, State)
    return CacheReport(
        lifecycle=cache.lifecycle.kind,
        **cache.lifecycle.model_dump(exclude={"kind"}),
        tensors=tensors,
        bytes_per_token=None if is_state else whole(cache.bytes_per_token),
        bytes_per_sequence=cache.bytes_per_sequence if is_state else None,
        shares_kv_with=cache.shares_kv_with,
    )
