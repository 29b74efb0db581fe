"""Claims about which layers of a hybrid keep what, and about configs that contradict themselves."""

import pytest

from hybridkv.errors import SpecError
from hybridkv.specs import ModelSpec
from tests.config_cases import Config, read, tiny

LETTERS = {"full_attention": "A", "sliding_window": "A", "state": "s"}
KDA: Config = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
ZAMBA2 = {"mamba_headdim": 16, "num_key_value_heads": 4}


def layout(spec: ModelSpec) -> str:
    """Return one word a layer: A for attention, s for a state, `-` for neither."""
    return " ".join("".join(LETTERS[c.lifecycle.kind] for c in layer.caches) or "-" for layer in spec.layers)


def kimi(full: object, linear: object, **fields: object) -> Config:
    """Return a tiny Kimi Linear with these two lists; `...` leaves one out."""
    lists = {key: value for key, value in {"full_attn_layers": full, "kda_layers": linear}.items() if value is not ...}
    return tiny("kimi_linear", linear_attn_config={**KDA, **lists}, **fields)


def gdn(**fields: object) -> Config:
    """Return a tiny Qwen3-Next."""
    return tiny("qwen3_next", **fields)


def nemotron(**fields: object) -> Config:
    """Return a tiny Nemotron-H, by default without a number of layers."""
    return tiny("nemotron_h", **{"num_hidden_layers": ..., **fields})


def granite(**fields: object) -> Config:
    """Return a tiny Granite 4.0 H."""
    return tiny("granitemoehybrid", **{"mamba_n_heads": 8, **fields})


@pytest.mark.parametrize(("config", "expected"), [
    (tiny("mamba"), "s s s s s s"),
    (tiny("jamba", attn_layer_period=3, attn_layer_offset=1), "s A s s A s"),
    (tiny("jamba"), "s s s s A s"),
    (tiny("bamba", mamba_n_heads=8, attn_layer_indices=[2, 5]), "s s A s s A"),
    (tiny("bamba", mamba_n_heads=8, attn_layer_indices=None), "s s s s s s"),
    (granite(), "s s s s s s"),
    (granite(layers_block_type=["mamba", "attention"] * 3), "s A s A s A"),
    (granite(layer_types=["attention"] * 6, mamba_n_heads=0), "A A A A A A"),  # sizes of states it lacks are inert
    (tiny("falcon_h1", mamba_d_ssm=64, mamba_n_heads=8), "As As As As As As"),
    (tiny("zamba", num_key_value_heads=4, num_hidden_layers=10), "s s As s s s s As s s"),
    (tiny("zamba", num_key_value_heads=4, attn_layer_period=2, attn_layer_offset=0), "s s As As s As"),
    (tiny("zamba2", **ZAMBA2, hybrid_layer_ids=[1, 3]), "s As s As s s"),
    (tiny("zamba2", **ZAMBA2, num_hidden_layers=54), "s " + "s s s s s As " * 7 + "s s s s As s s s As s s"),
    (nemotron(), "s - A -"),
    (nemotron(hybrid_override_pattern="ME*M-*"), "s - A s - A"),
    (nemotron(layers_block_type=["mamba", "moe", "attention", "mlp"]), "s - A -"),
    (nemotron(layer_types=["linear_attention", "full_attention"]), "s A"),
    (gdn(), "s s s A s s"),
    (gdn(full_attention_interval=2), "s A s A s A"),
    (tiny("olmo_hybrid", num_hidden_layers=3), "s s A"),
    (kimi([3, 6], [1, 2, 4, 5]), "s s A s s A"),
    (tiny("kimi_linear"), "s s s s A s"),  # the class default counts from 0
    (tiny("recurrent_gemma"), "s s A s s A"),
    (tiny("recurrent_gemma", _block_types=["attention", "recurrent"]), "A s A s A s"),
    (tiny("lfm2", full_attn_idxs=[2, 4]), "s s A s A s"),
    (tiny("lfm2", full_attn_idxs=[]), "s s s s s s"),
    (tiny("lfm2"), "A A A A A A"),
    (tiny("minimax"), "A s A s A s"),
    (tiny("minimax_text_01", attn_type_list=[0, 0, 1] * 2), "s s A s s A"),
])  # fmt: skip
def test_each_family_has_its_rule(config: Config, expected: str) -> None:
    """Lists, patterns, periods and their absence give what each layer keeps."""
    assert layout(read(config)) == expected


@pytest.mark.parametrize(("config", "shapes"), [
    (tiny("mamba", expand=3, state_size=5), {"conv": (192, 3), "ssm": (192, 5)}),
    (tiny("falcon_mamba", expand=16, intermediate_size=160), {"conv": (160, 3), "ssm": (160, 16)}),
    (tiny("mamba2", num_heads=8, state_size=5, n_groups=2), {"conv": (148, 3), "ssm": (8, 16, 5)}),
    (tiny("zamba", mamba_d_conv=5), {"conv": (128, 4), "ssm": (2, 64, 16)}),
    (tiny("zamba2", **ZAMBA2, hybrid_layer_ids=[]), {"conv": (256, 3), "ssm": (8, 16, 64)}),
    (tiny("zamba2", n_mamba_heads=4, hybrid_layer_ids=[]), {"conv": (256, 3), "ssm": (4, 32, 64)}),
    (granite(mamba_d_head="auto"), {"conv": (640, 3), "ssm": (8, 16, 256)}),
    (tiny("falcon_h1", mamba_n_heads=8, mamba_d_ssm=None), {"conv": (640, 3), "ssm": (8, 16, 256)}),
    (tiny("falcon_h1", mamba_n_heads=8, mamba_d_head="auto"), {"conv": (1536, 3), "ssm": (8, 128, 256)}),
    (nemotron(mamba_num_heads=3, mamba_n_groups=1, n_groups=9), {"conv": (448, 3), "ssm": (3, 64, 128)}),
    (gdn(linear_num_value_heads=16, linear_key_head_dim=8), {"conv": (2304, 3), "recurrent": (16, 128, 8)}),
    (tiny("olmo_hybrid"), {"conv": (192, 3), "recurrent": (4, 24, 12)}),
    (kimi([6], [1, 2, 3, 4, 5], linear_num_heads=9), {"conv": (48, 3), "recurrent": (2, 8, 8)}),
    (tiny("kimi_linear", linear_num_heads=3, linear_head_dim=4), {"conv": (36, 3), "recurrent": (3, 4, 4)}),
    (tiny("recurrent_gemma", lru_width=None), {"conv": (64, 3), "recurrent": (64,)}),
    (tiny("lfm2", full_attn_idxs=[5], conv_dim=32), {"conv": (32, 2)}),
    (tiny("lfm2", full_attn_idxs=[5], conv_dim=None), {"conv": (64, 2)}),
    (tiny("minimax", head_dim=None), {"recurrent": (4, 16, 16)}),
])  # fmt: skip
def test_sizes_are_stated_default_or_derived(config: Config, shapes: dict[str, tuple[int, ...]]) -> None:
    """A state's shape comes from the config, else from the class default, else from the sizes it follows from."""
    states = [cache for _, _, cache in read(config).owned_caches() if cache.lifecycle.kind == "state"]
    assert [{tensor.name: tensor.shape for tensor in cache.tensors} for cache in states] == [shapes] * len(states)


@pytest.mark.parametrize(("config", "shape"), [
    (tiny("zamba"), (2, 16)),
    (tiny("zamba", head_dim=..., attention_head_dim=24), (2, 24)),
    (tiny("zamba", head_dim=..., attention_head_dim=None), (2, 32)),
    (tiny("zamba2", **ZAMBA2 | {"num_key_value_heads": None}, head_dim=..., hybrid_layer_ids=[0]), (4, 32)),
    (nemotron(head_dim=...), (2, 128)),
    (nemotron(head_dim=..., attention_head_dim=24), (2, 24)),
    (tiny("bamba", mamba_n_heads=8, head_dim=None, attn_layer_indices=[0]), (2, 16)),
    (tiny("recurrent_gemma", num_key_value_heads=...), (4, 16)),
])  # fmt: skip
def test_attention_of_a_hybrid_has_its_own_sizes(config: Config, shape: tuple[int, int]) -> None:
    """Heads and head_dim of the attention layers follow the family's names and class defaults."""
    keys = {cache.tensors[0].shape for _, _, cache in read(config).owned_caches() if cache.tensors[0].name == "k"}
    assert keys == {shape}


@pytest.mark.parametrize(("config", "max_len"), [
    (tiny("mamba", max_position_embeddings=...), None),
    (tiny("mamba2", num_heads=8, head_dim=16, max_position_embeddings=...), None),
    (tiny("recurrent_gemma", max_position_embeddings=...), None),
    (tiny("recurrent_gemma"), 256),
    (kimi([6], [1, 2, 3, 4, 5], model_max_length=512), 512),
    (kimi([6], [1, 2, 3, 4, 5], max_position_embeddings=...), 1048576),
    (tiny("zamba2", **ZAMBA2, hybrid_layer_ids=[0], use_long_context=True), 16384),
])  # fmt: skip
def test_the_longest_sequence_is_stated_default_or_none(config: Config, max_len: int | None) -> None:
    """A family without positions has no longest sequence, the others their config's or class default."""
    assert read(config).max_model_len == max_len


def test_a_window_of_recurrent_gemma_has_two_names() -> None:
    """`sliding_window` is another name of `attention_window_size`, and every attention layer slides."""
    for name in ("attention_window_size", "sliding_window"):
        lifecycles = [layer.caches[0].lifecycle for layer in read(tiny("recurrent_gemma", **{name: 8})).layers]
        assert [getattr(life, "window", None) for life in lifecycles] == [None, None, 8] * 2


def test_per_layer_config_reaches_states() -> None:
    """An override of one layer changes this layer's state and attention, and no other's."""
    overrides = {"01": {"mamba_d_state": 7}, "02": {"head_dim": 24}}
    spec = read(granite(layer_types=["mamba", "mamba", "attention"] * 2, per_layer_config=overrides))
    shapes = [layer.caches[0].tensors[-1].shape for layer in spec.layers]
    assert shapes == [(8, 16, 256), (8, 16, 7), (2, 24), (8, 16, 256), (8, 16, 256), (2, 16)]


ALTERNATE = ["linear_attention", "full_attention"] * 3
WRONG = [
    (tiny("mamba", conv_kernel=1), ["conv_kernel: got 1", "at least 2", "remove it for 4"]),
    (tiny("lfm2", full_attn_idxs=[0], conv_L_cache=1), ["conv_L_cache: got 1", "at least 2"]),
    (tiny("mamba", intermediate_size=None), ["intermediate_size: got null", "integer"]),
    (tiny("mamba", state_size=0), ["state_size: got 0", "at least 1"]),
    (tiny("mamba", layer_types=ALTERNATE), ["layer_types: got", "contradicts model_type", "layer 1"]),
    (tiny("mamba2", num_heads=3), ["num_heads: got 3", "expand * hidden_size 128", "correct one"]),
    (tiny("jamba", attn_layer_offset=9), ["attn_layer_offset: got 9", "below attn_layer_period 8"]),
    (
        tiny("jamba", layers_block_type=["mamba"] * 6),
        ["layers_block_type: got", "contradicts attn_layer_period", "layer 4"],
    ),
    (tiny("jamba", sliding_window=8), ["sliding_window: got 8", "null"]),
    (tiny("bamba", attn_layer_indices=[6]), ["attn_layer_indices: got [6]", "0..5"]),
    (tiny("bamba", attn_layer_indices=[1, 1]), ["attn_layer_indices: got [1, 1]", "twice"]),
    (
        tiny("bamba", attn_layer_indices=[1], layer_types=ALTERNATE),
        ["layer_types: got", "contradicts attn_layer_indices", "layer 3"],
    ),
    (granite(mamba_n_heads=5), ["mamba_n_heads: got 5", "divide", "128"]),
    (granite(mamba_d_head=8), ["mamba_d_head: got 8", "128", "use 16"]),
    (granite(mamba_d_head=None), ["mamba_d_head: got null", "integer"]),
    (granite(layer_types=["mamba"] * 5), ["layer_types: got", "5 entries", "num_hidden_layers is 6"]),
    (granite(layer_types=["conv"] * 6), ["layer_types: got", "entry 0", "'mamba'", "'conv'"]),
    (
        granite(layer_types=ALTERNATE, layers_block_type=ALTERNATE[::-1]),
        ["layers_block_type: got", "contradicts layer_types", "layer 0"],
    ),
    (tiny("falcon_h1", attn_layer_indices=[0]), ["attn_layer_indices: got [0]", "contradicts model_type", "layer 1"]),
    (tiny("zamba", n_mamba_heads=3), ["n_mamba_heads: got 3", "divide", "128"]),
    (
        tiny("zamba", layers_block_type=["mamba"] * 6, attn_layer_period=3),
        ["attn_layer_period: got 3", "contradicts layers_block_type"],
    ),
    (tiny("zamba2"), ["layers_block_type: got nothing", "6 layers", "54"]),
    (
        tiny("zamba2", **ZAMBA2, n_mamba_heads=4, hybrid_layer_ids=[]),
        ["n_mamba_heads: got 4", "mamba_headdim 16", "use 8"],
    ),
    (tiny("zamba2", **ZAMBA2, state_size=8, hybrid_layer_ids=[]), ["state_size: got 8", "rename it to mamba_d_state"]),
    (
        tiny("zamba2", hybrid_layer_ids=[0], layers_block_type=["mamba"] * 6),
        ["hybrid_layer_ids: got [0]", "contradicts layers_block_type"],
    ),
    (nemotron(hybrid_override_pattern="MXM"), ["hybrid_override_pattern: got 'MXM'", "letter 1", "'X'"]),
    (nemotron(hybrid_override_pattern="M*", num_hidden_layers=3), ["got 'M*'", "2 letters", "num_hidden_layers is 3"]),
    (
        nemotron(hybrid_override_pattern="M*", layers_block_type=["mamba", "mlp"]),
        ["hybrid_override_pattern: got 'M*'", "contradicts layers_block_type", "layer 1"],
    ),
    (
        nemotron(hybrid_override_pattern="M*", layers_block_type=["mamba"]),
        ["hybrid_override_pattern: got 'M*'", "contradicts layers_block_type", "2 layers", "1"],
    ),
    (nemotron(hybrid_override_pattern="-E"), ["hybrid_override_pattern: got '-E'", "keeps"]),
    (nemotron(layers_block_type=[]), ["layers_block_type: got []", "1..4096"]),
    (nemotron(num_hidden_layers=6), ["hybrid_override_pattern: got nothing", "6 layers"]),
    (nemotron(attention_head_dim=24), ["attention_head_dim: got 24", "contradicts head_dim 16"]),
    (gdn(full_attention_interval=0), ["full_attention_interval: got 0", "at least 1"]),
    (
        gdn(layer_types=ALTERNATE, full_attention_interval=3),
        ["full_attention_interval: got 3", "contradicts layer_types", "layer 1"],
    ),
    (gdn(linear_num_key_heads=3), ["linear_num_value_heads: got nothing", "multiple", "3"]),
    (tiny("olmo_hybrid", layer_types=["linear_attention"] * 6), ["layer_types: got", "'full_attention'"]),
    (tiny("olmo_hybrid", linear_num_key_heads=100), ["linear_key_head_dim: got nothing", "give it"]),
    (kimi([0, 3], [1, 2, 4, 5, 6]), ["linear_attn_config.full_attn_layers: got [0, 3]", "1..6", "counts from 1"]),
    (kimi([7], [1, 2, 3, 4, 5, 6]), ["full_attn_layers: got [7]", "1..6"]),
    (kimi([3, 6], [1, 2, 3, 4, 5]), ["kda_layers: got", "layer 3 is in full_attn_layers too"]),
    (kimi([3], [1, 2, 4, 5]), ["kda_layers: got", "layer 6 is in neither list"]),
    (kimi([3], ...), ["linear_attn_config.kda_layers: got nothing", "give both lists"]),
    (kimi([6], [1, 2, 3, 4, 5], layer_types=ALTERNATE), ["linear_attn_config: got", "contradicts layer_types"]),
    (tiny("kimi_linear", linear_attn_config=None), ["linear_attn_config: got null", "object"]),
    (tiny("recurrent_gemma", block_types=[]), ["block_types: got []", "entries"]),
    (
        tiny("recurrent_gemma", block_types=["recurrent"], _block_types=["attention"]),
        ["_block_types: got", "contradicts block_types"],
    ),
    (
        tiny("lfm2", full_attn_idxs=[0], layer_types=["conv"] * 6),
        ["full_attn_idxs: got [0]", "contradicts layer_types"],
    ),
    (tiny("minimax_text_01"), ["attn_type_list: got nothing", "0 or 1"]),
    (tiny("minimax_text_01", attn_type_list=[0, 1, 2] * 2), ["attn_type_list: got", "entry 2", "is 2"]),
    (tiny("minimax_text_01", attn_type_list=[False] * 6), ["attn_type_list: got", "entry 0", "is False"]),
    (granite(per_layer_config={"1": {"mamba_d_state": 0}}), ["per_layer_config.1.mamba_d_state: got 0"]),
]


@pytest.mark.parametrize(("config", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_wrong_hybrid_is_one_line_with_field_value_rule_and_fix(config: Config, words: list[str]) -> None:
    """Contradictions, unknown letters, wrong lengths, indices out of range and empty states are refused in one line."""
    with pytest.raises(SpecError) as caught:
        read(config)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("config of 'tiny': ")
    assert ";" in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("config", "ranks", "words"), [
    (tiny("mamba", expand=1), 3, "64 channels"),
    (tiny("mamba2", num_heads=6, head_dim=32, expand=3, n_groups=3), 2, "3 Mamba groups"),
    (gdn(num_key_value_heads=1, linear_num_key_heads=4), 8, "4 key heads"),
    (tiny("minimax"), 8, "4 heads"),
    (tiny("lfm2", full_attn_idxs=[]), 3, "64 channels"),
    (tiny("recurrent_gemma"), 3, "64 channels"),
])  # fmt: skip
def test_ranks_that_do_not_divide_a_state_are_refused(config: Config, ranks: int, words: str) -> None:
    """The error names tp_size, its value and what it must divide, in one line."""
    with pytest.raises(SpecError, match=rf"^tp_size: got {ranks}, must divide the [^\n]*; use [^\n]*$") as caught:
        read(config, tp_size=ranks)
    assert words in str(caught.value)
