"""Claims about families whose attention layers differ, share caches, or keep more than K and V."""

import pytest

from hybridkv.errors import SpecError, UnsupportedModel
from hybridkv.specs import CrossAttention
from tests.config_cases import TYPE_NAMES, C, Config, F, S, kinds, read, shapes, tiny, windows


def types(*names: str) -> list[str]:
    """Return `layer_types` from short names."""
    return [TYPE_NAMES[name] for name in names]


def key_shapes(config: Config) -> list[tuple[int, ...] | None]:
    """Return the shape of the first tensor of each layer, None where the layer owns nothing."""
    caches = [layer.caches[0] if layer.caches else None for layer in read(config).layers]
    return [cache.tensors[0].shape if cache is not None and cache.tensors else None for cache in caches]


@pytest.mark.parametrize(("config", "expected"), [
    (tiny("gemma3n_text", num_kv_shared_layers=0), [S, S, S, S, F, S]),
    (tiny("gemma3n_text", num_kv_shared_layers=1), [S, S, S, S, F, "=3"]),
    (tiny("gemma3n_text", num_kv_shared_layers=3, layer_types=types(S, F, S, S, F, S)), [S, F, S, "=2", "=1", "=2"]),
    (tiny("gemma4_text", num_kv_shared_layers=2, layer_types=types(S, F, F, S, S, S)), [S, F, F, S, "=3", "=2"]),
    (tiny("gemma4_text"), [S, S, S, S, S, F]),
    (tiny("gemma4_text", num_hidden_layers=8), [S, S, S, S, S, F, S, F]),
])  # fmt: skip
def test_the_last_layers_read_the_last_owner_of_their_kind(config: Config, expected: list[str]) -> None:
    """`num_kv_shared_layers` layers own nothing: each reads the last earlier layer of its kind that does."""
    assert kinds(read(config)) == expected


def test_gemma_3n_shares_by_default_and_gemma_4_does_not() -> None:
    """A missing count of shared layers is the config class's: 15 of Gemma 3n's 35 layers, none of Gemma 4's."""
    assert sum(kind.startswith("=") for kind in kinds(read({"model_type": "gemma3n_text"}))) == 15
    assert set(kinds(read({"model_type": "gemma4_text"}))) == {S, F}


@pytest.mark.parametrize(("shared", "words"), [
    (6, "num_kv_shared_layers: got 6, must leave at least one of 6 layers"),
    (2, "num_kv_shared_layers: got 2, layer 5 would share with a 'full_attention' layer, but none of the first 4 is"),
    (-1, "num_kv_shared_layers: got -1, must be an integer of at least 0"),
])  # fmt: skip
def test_sharing_needs_an_owner_of_each_kind(shared: int, words: str) -> None:
    """A count of shared layers that leaves a kind without an owner is refused by name."""
    with pytest.raises(SpecError, match=words):
        read(tiny("gemma4_text", num_kv_shared_layers=shared))


def test_full_layers_of_gemma_4_have_a_geometry_of_their_own() -> None:
    """Full layers take global_head_dim, and their own KV heads only with attention_k_eq_v; overrides replace both."""
    own: Config = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    assert key_shapes(tiny("gemma4_text", **own))[4:] == [(2, 16), (2, 64)]
    assert key_shapes(tiny("gemma4_text", attention_k_eq_v=True, **own))[4:] == [(2, 16), (1, 64)]
    assert key_shapes(tiny("gemma4_text"))[5] == (2, 512)
    assert key_shapes(tiny("gemma4_text", per_layer_config={"5": {"head_dim": 8}}, **own))[4:] == [(2, 16), (2, 8)]
    with pytest.raises(SpecError, match="num_global_key_value_heads: got 3, must divide num_attention_heads 4"):
        read(tiny("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=3))


@pytest.mark.parametrize(("value", "window"), [("all", 257), ("vision", 512), (None, 512)])
def test_only_gemma_4_that_is_bidirectional_throughout_halves_its_window(value: str | None, window: int) -> None:
    """Images that look both ways leave the text's window alone."""
    assert windows(read(tiny("gemma4_text", sliding_window=512, use_bidirectional_attention=value)))[0] == window


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, [C, C, C, F, C, C]),
    ({"no_rope_layers": []}, [C, C, C, F, C, C]),
    ({"no_rope_layer_interval": 2}, [C, F] * 3),
    ({"no_rope_layers": [0, 1, 1, 1, 1, 0]}, [F, C, C, C, C, F]),
    ({"layer_types": types(F, F, C, C, C, C)}, [F, F, C, C, C, C]),
    ({"layer_types": types(F, F, C, C, C, C), "no_rope_layers": [1, 1, 1, 0, 1, 1]}, [F, F, C, C, C, C]),
    ({"attention_chunk_size": None}, [F] * 6),
])  # fmt: skip
def test_llama_4_is_chunked_where_it_has_rotary_embedding(fields: Config, expected: list[str]) -> None:
    """`layer_types`, else the marks, else the interval say which layers keep their chunk only."""
    spec = read(tiny("llama4_text", **fields))
    assert kinds(spec) == expected
    assert set(windows(spec)) <= {8192, None}


def test_latent_attention_ignores_head_counts() -> None:
    """An MLA layer keeps kv_lora_rank + qk_rope_head_dim elements a token, whatever the heads."""
    config = tiny("deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=8, v_head_dim=7, num_key_value_heads=3)
    assert kinds(read(config)) == ["mla"] * 6
    assert shapes(read(config)) == {(1, 40)}
    assert shapes(read({"model_type": "kimi_k25", "text_config": {**config, "model_type": "kimi_k2"}})) == {(1, 40)}


def test_the_indexer_is_a_second_cache() -> None:
    """DeepSeek-V3.2 keeps an indexer key a layer beside the latent, unless index_topk is null."""
    assert kinds(read(tiny("deepseek_v32", index_head_dim=24))) == ["mla+indexer"] * 6
    assert shapes(read(tiny("deepseek_v32", index_head_dim=24))) == {(1, 576), (1, 24)}
    assert kinds(read(tiny("deepseek_v32", index_topk=None))) == ["mla"] * 6
    with pytest.raises(SpecError, match="index_topk: got 2048, this family has no indexer"):
        read(tiny("deepseek_v3", index_topk=2048))
    with pytest.raises(SpecError, match=r"layer_types: got .* entry 5 must be one of 'indexed_attention'"):
        read(tiny("deepseek_v32", layer_types=["indexed_attention"] * 5 + ["full_attention"]))


def test_hunyuan_shares_in_runs() -> None:
    """The first layer of each cla_share_factor layers owns the caches of its run, the last run may be shorter."""
    assert kinds(read(tiny("hunyuan", use_cla=True, cla_share_factor=4))) == [F, "=0", "=0", "=0", F, "=4"]
    assert kinds(read(tiny("hunyuan", use_cla=True, cla_share_factor=1))) == [F] * 6
    assert kinds(read(tiny("hunyuan", cla_share_factor=2))) == [F] * 6
    assert shapes(read(tiny("hunyuan", head_dim=..., attention_head_dim=24))) == {(2, 24)}
    with pytest.raises(SpecError, match="cla_share_factor: got nothing"):
        read(tiny("hunyuan", use_cla=True))


@pytest.mark.parametrize("fields", [
    {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "sliding_window_size": 8, "swa_num_key_value_heads": 4},
    {"sliding_window": 9, "attention_chunk_size": 5},
    {"layer_types": types(F, S, S, S, S, F), "sliding_window_size": 8, "sliding_window": 9},
])  # fmt: skip
def test_mimo_has_more_kv_heads_where_it_slides(fields: Config) -> None:
    """K is wider than V in both kinds of layer, and twice the KV heads slide, in a window of size + 1 tokens."""
    spec = read(tiny("mimo_v2_flash", head_dim=24, v_head_dim=16, **fields))
    assert windows(spec) == [None, 9, 9, 9, 9, None]
    by_layer = [[tensor.shape for tensor in layer.caches[0].tensors] for layer in spec.layers]
    assert by_layer == [[(2, 24), (2, 16)], *[[(4, 24), (4, 16)]] * 4, [(2, 24), (2, 16)]]


def block(**attention: object) -> Config:
    """Return one block of a searched architecture."""
    return {"attention": attention, "ffn": {}}


def test_nemotron_nas_has_kv_heads_per_layer() -> None:
    """Each block says how many query heads share a KV head, or that it has no attention."""
    blocks = [block(n_heads_in_group=2), block(no_op=True), block(n_heads_in_group=4), block(replace_with_linear=True)]
    config = tiny("nemotron-nas", num_hidden_layers=4, num_key_value_heads=None, block_configs=blocks)
    assert kinds(read(config)) == [F, "none", F, "none"]
    assert key_shapes(config) == [(2, 16), None, (1, 16), None]


@pytest.mark.parametrize(("blocks", "words"), [
    ([block(no_op=True)] * 5, "block_configs: got .* must be a list of 6"),
    ([block(no_op=True)] * 6, "block_configs: got .* no block has attention"),
    ([block(n_heads_in_group=3)] * 6, "block_configs.0.attention.n_heads_in_group: got 3, must divide"),
    ([block()] * 6, "block_configs.0.attention.n_heads_in_group: got nothing"),
    ([{}] * 6, "block_configs.0.attention: got nothing"),
])  # fmt: skip
def test_nemotron_nas_explains_a_wrong_block(blocks: list[Config], words: str) -> None:
    """A block that says neither what it keeps nor that it keeps nothing is refused with its path."""
    with pytest.raises(SpecError, match=words):
        read(tiny("nemotron-nas", block_configs=blocks))


WHISPER: Config = {"model_type": "whisper", "d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4}
T5: Config = {"model_type": "t5", "num_layers": 4, "num_heads": 4, "d_kv": 16, "d_model": 99}


def test_decoders_of_an_encoder_keep_its_output_too() -> None:
    """Whisper and T5 have a growing and a fixed cache per decoder layer; the encoder's count is not theirs."""
    spec = read({**WHISPER, "num_hidden_layers": 9, "encoder_layers": 9})
    assert kinds(spec) == ["full+cross"] * 3
    assert spec.layers[0].caches[1].lifecycle == CrossAttention(max_source_tokens=1500)
    assert kinds(read({**T5, "n_positions": 512})) == ["full+cross"] * 4
    assert kinds(read({**T5, "n_positions": 512, "num_decoder_layers": 2})) == ["full+cross"] * 2
    assert shapes(read({**T5, "n_positions": 512})) == {(4, 16)}


def test_the_longest_source_is_the_configs_or_the_callers() -> None:
    """T5 takes n_positions; the option goes before any limit, and is required where there is none."""

    def source(config: Config, **options: object) -> object:
        return read(config, **options).layers[-1].caches[-1].lifecycle

    assert source({**T5, "n_positions": 512}) == CrossAttention(max_source_tokens=512)
    assert source({**T5, "n_positions": 512}, max_source_tokens=7) == CrossAttention(max_source_tokens=7)
    assert source(T5, max_source_tokens=7) == CrossAttention(max_source_tokens=7)
    assert source(WHISPER, max_source_tokens=7) == CrossAttention(max_source_tokens=7)
    with pytest.raises(SpecError, match=r"n_positions: got nothing.*give the option max_source_tokens"):
        read(T5)


def test_llama_vision_keeps_image_tokens_in_its_cross_layers() -> None:
    """A cross-attention layer keeps a class token and the patches of every tile of one image, the others the text."""
    text = tiny("mllama_text_model", cross_attention_layers=[1, 3])
    vision = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}
    spec = read({"model_type": "mllama", "text_config": text, "vision_config": vision})
    assert kinds(spec) == [F, "cross", F, "cross", F, F]
    assert spec.layers[1].caches[0].lifecycle == CrossAttention(max_source_tokens=6404)
    assert read(text, max_source_tokens=6404) == spec
    with pytest.raises(SpecError, match=r"vision_config: got nothing.*give the option max_source_tokens"):
        read(text)


@pytest.mark.parametrize(("listed", "words"), [
    ([1, 6], r"entry 6 must be a layer 0\.\.5: this list counts from 0; correct the entry, or renumber"),
    ([-1], "entry -1"),
    ([True], "entry True"),
    ([1, 1], "has an entry twice"),
    ({"1": 1}, "must be a list"),
])  # fmt: skip
def test_a_list_of_layers_counts_from_0(listed: object, words: str) -> None:
    """An entry that is no layer, such as the last one counted from 1, is refused with the range."""
    config = tiny("mllama_text_model", cross_attention_layers=listed)
    with pytest.raises(SpecError, match=f"cross_attention_layers: got .*{words}"):
        read(config, max_source_tokens=5)


def test_a_list_that_counts_from_1_refuses_0() -> None:
    """Kimi Linear's lists count from 1: 0 shows that the list was renumbered, the last layer is num_hidden_layers."""
    linear: Config = {"full_attn_layers": [3, 6], "kda_layers": [1, 2, 4, 5], "num_heads": 4, "head_dim": 16}
    config = tiny("kimi_linear", kv_lora_rank=32, qk_rope_head_dim=8)
    assert kinds(read({**config, "linear_attn_config": linear})) == ["kda", "kda", "mla", "kda", "kda", "mla"]
    shifted = {**linear, "full_attn_layers": [2, 5], "kda_layers": [0, 1, 3, 4]}
    with pytest.raises(SpecError, match=r"kda_layers: got .* must be a layer 1\.\.6: this list counts from 1"):
        read({**config, "linear_attn_config": shifted})


@pytest.mark.parametrize("config", [
    tiny("hunyuan", use_mla=True),
    tiny("hunyuan_v1_dense", use_cla=True),
    tiny("nemotron-nas", block_configs=[block(n_heads_in_group=2, window_length=8)] * 6),
    tiny("llama", per_layer_config={"1": {"skip": ["attention"]}}),
], ids=["latents", "shared runs", "window in a block", "skipped attention"])  # fmt: skip
def test_a_switch_without_a_reader_is_unsupported(config: Config) -> None:
    """A family's field that asks for caches its reader does not know is refused, not ignored."""
    with pytest.raises(UnsupportedModel, match=r"config of 'tiny': .*; "):
        read(config)
