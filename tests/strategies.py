"""Hypothesis strategies of valid specs."""

from hypothesis import strategies as st

from hybridkv.specs import (
    DTYPE_BYTES,
    CacheTensor,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LayerCache,
    LayerSpec,
    Lifecycle,
    ModelSpec,
    SlidingWindow,
    State,
)

STATE_FAMILIES = ("mamba1", "mamba2", "gated_delta_net", "kda", "lightning", "short_conv", "rglru")

sizes = st.integers(min_value=1, max_value=2**31 - 1)
names = st.text(min_size=1, max_size=12)


def lifecycles() -> st.SearchStrategy[Lifecycle]:
    """Lifecycles of every kind."""
    return st.one_of(
        st.just(FullAttention()),
        st.builds(SlidingWindow, window=sizes),
        st.builds(ChunkedAttention, chunk=sizes),
        st.builds(CrossAttention, max_source_tokens=sizes),
        st.builds(State, family=st.sampled_from(STATE_FAMILIES)),
    )


@st.composite
def owned_caches(draw: st.DrawFn) -> LayerCache:
    """Caches that own bytes."""
    lifecycle = draw(lifecycles())
    is_state = lifecycle.kind == "state"
    tensors = st.builds(
        CacheTensor,
        name=names,
        kind=st.just("per_sequence" if is_state else "per_token"),
        shape=st.lists(sizes, min_size=1, max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        tokens_per_entry=st.just(1) if is_state else st.integers(min_value=1, max_value=128),
    )
    chosen = draw(st.lists(tensors, min_size=1, max_size=3, unique_by=lambda tensor: tensor.name))
    return LayerCache(lifecycle=lifecycle, tensors=tuple(chosen))


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Models of up to six layers: layers without caches, with several, with shared ones."""
    layers = [LayerSpec(layer=0, caches=(draw(owned_caches()),))]
    for layer in range(1, draw(st.integers(min_value=1, max_value=6))):
        caches = draw(st.lists(owned_caches(), max_size=2))
        owners = [spec for spec in layers if any(cache.tensors for cache in spec.caches)]
        if draw(st.booleans()):
            owner = draw(st.sampled_from(owners))
            lifecycle = draw(st.sampled_from([cache.lifecycle for cache in owner.caches if cache.tensors]))
            caches.append(LayerCache(lifecycle=lifecycle, shares_kv_with=owner.layer))
        layers.append(LayerSpec(layer=layer, caches=tuple(caches)))
    return ModelSpec(
        name=draw(names),
        model_type=draw(names),
        max_model_len=draw(st.none() | sizes),
        layers=tuple(layers),
    )
