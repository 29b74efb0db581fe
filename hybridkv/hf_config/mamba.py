"""Mamba, Falcon-Mamba, Mamba-2: a state in every layer, no attention, no longest sequence."""

from hybridkv.hf_config.attention import Decoder, layer_count, max_model_len
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import LAYER_NAMES, STATE, hybrid_decoder, listed_layers, stated_layers
from hybridkv.hf_config.states import Mamba2Sizes, kernel_size, mamba1_state, mamba2_state
from hybridkv.specs import LayerCache


def mamba(fields: ConfigFields) -> Decoder:
    """Mamba, Falcon-Mamba: `intermediate_size` wins over `expand`."""

    def state(layer: ConfigFields) -> LayerCache:
        channels = layer.integer("expand", 2) * layer.integer("hidden_size", 768)
        return mamba1_state(
            layer.integer("intermediate_size", channels),
            layer.integer("state_size", 16),
            kernel_size(layer, "conv_kernel", 4),
        )

    count = layer_count(fields, "num_hidden_layers", 32)
    _check_all_states(fields, count)
    return hybrid_decoder(fields, [STATE] * count, state=state, max_len=max_model_len(fields, None))


def mamba2(fields: ConfigFields) -> Decoder:
    """Mamba-2: `num_heads` and `head_dim` are the heads of the state."""

    def state(layer: ConfigFields) -> LayerCache:
        num_heads, head_dim = layer.integer("num_heads", 128), layer.integer("head_dim", 64)
        width = layer.integer("expand", 2) * layer.integer("hidden_size", 4096)
        if num_heads * head_dim != width:
            rule = f"times head_dim {head_dim} must be expand * hidden_size {width}"
            raise layer.error("num_heads", f"{num_heads} {rule}", "correct one of them")
        sizes = Mamba2Sizes(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=layer.integer("state_size", 128),
            num_groups=layer.integer("n_groups", 8),
            kernel=kernel_size(layer, "conv_kernel", 4),
        )
        return mamba2_state(sizes)

    count = layer_count(fields, "num_hidden_layers", 64)
    _check_all_states(fields, count)
    return hybrid_decoder(fields, [STATE] * count, state=state, max_len=max_model_len(fields, None))


def _check_all_states(fields: ConfigFields, count: int) -> None:
    listed = listed_layers(fields, "layer_types", LAYER_NAMES, count)
    stated_layers(fields, {"model_type": (STATE,) * count, "layer_types": listed})
