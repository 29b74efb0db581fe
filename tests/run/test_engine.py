"""The engine: sampling, stopping, streaming, refusals, and what a run leaves behind."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hybridkv import InvalidRequest, NeverFits, SpecError, UnsupportedModel
from hybridkv.attention import LayerParams, TritonBackend
from hybridkv.runner import EngineConfig, SamplingParams
from hybridkv.runner.gemma import ForwardStep, paged_attention
from hybridkv.runner.projection import tall_projection
from hybridkv.runner.sampler import Sampler
from hybridkv.runner.sequence import Sequence
from hybridkv.runner.text import TextStream
from hybridkv.runner.tiny import make_tiny
from hybridkv.runner.tiny_configs import VOCAB_SIZE
from hybridkv.runner.verify import StopRules, verify_greedy
from tests.run.parity import run_parity, tiny_engine

PROMPTS = [[1, 2, 3], list(range(40)), [200] * 7, [9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Gemma 3 with a byte tokenizer."""
    return make_tiny("gemma3_text", tmp_path_factory.mktemp("engine") / "gemma3", tokenizer=True)


@pytest.fixture
def engine(folder):
    return tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4, max_num_batched_tokens=16))[1]


def test_nan_in_every_unwritten_byte_changes_nothing(tmp_path, monkeypatch):
    """Poison in all memory but the null blocks never reaches an output."""
    from hybridkv.arena import Arena

    make = Arena.__init__

    def poisoned(self, plan, **kwargs):
        make(self, plan, **kwargs)
        self._bytes[plan.slab_bytes :] = 0xFF  # all bits set is a NaN in every float format

    monkeypatch.setattr(Arena, "__init__", poisoned)
    config = EngineConfig(2**22, block_size=4, max_num_batched_tokens=16, preempt_every=9)
    for family in ("gemma3_text", "gpt_oss", "gemma2"):
        assert run_parity(family, tmp_path, "float32", config).verification.equal


def test_the_triton_backend_generates_the_same_tokens(folder):
    """The paged kernels, interpreted on a CPU, give the torch backend's tokens in both cache layouts."""
    prompts = [[1, 2, 3], [7] * 9]
    expected = None
    for backend in (None, TritonBackend("NHD"), TritonBackend("HND")):
        config = EngineConfig(2**20, block_size=4, max_num_batched_tokens=8, max_model_len=64)
        engine = tiny_engine(folder, "float32", config, backend)[1]
        tokens = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=3))]
        expected = expected or tokens
        assert tokens == expected


def test_a_seed_decides_a_sampled_output_whatever_the_batch(engine):
    """The same seed gives the same tokens alone and in company; another seed gives others."""
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.95, top_k=50, seed=5)
    alone = engine.generate(PROMPTS[:1], params)[0].token_ids
    company = engine.generate(PROMPTS, [params] + [SamplingParams(max_new_tokens=9, temperature=2.0)] * 3)[0].token_ids
    other = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12, temperature=1.0, seed=6))[0].token_ids
    assert alone == company
    assert alone != other


def _draw(logits, num_draws=400, **params):
    sequence = Sequence.create(0, [1], SamplingParams(**params), 10)
    sampler = Sampler(torch.device("cpu"))
    return [sampler.sample(torch.tensor([logits]), [sequence])[0] for _ in range(num_draws)]


def test_top_k_keeps_the_k_most_likely():
    """With top_k 2 only the two best tokens are drawn, and both are."""
    assert set(_draw([0.0, 2.0, 1.9, -1.0], temperature=1.0, top_k=2, seed=0)) == {1, 2}


def test_top_p_keeps_the_smallest_sufficient_set():
    """Probabilities 0.5, 0.3, 0.2 with top_p 0.6 leave the first two; with 0.5 the first alone."""
    logits = np.log([0.3, 0.5, 0.2]).tolist()
    assert set(_draw(logits, temperature=1.0, top_p=0.6, seed=0)) == {0, 1}
    assert set(_draw(logits, temperature=1.0, top_p=0.49, seed=0)) == {1}


def test_temperature_flattens_the_distribution():
    """Draws at temperature 1 follow the softmax within sampling error; a low temperature picks the best."""
    logits = np.log([0.7, 0.3]).tolist()
    share = np.mean(np.array(_draw(logits, 2000, temperature=1.0, seed=1)) == 0)
    assert abs(share - 0.7) < 0.05
    assert set(_draw(logits, temperature=0.01, seed=1)) == {0}


def test_a_stop_token_ends_the_output_and_stays_in_it(engine):
    """The output ends with the stop token; the same run without it goes on."""
    free = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=10))[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    cut = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=10, stop_token_ids=frozenset({stop})))[0]
    assert cut.token_ids == free.token_ids[: first + 1]
    assert (cut.finish_reason, free.finish_reason) == ("stop", "length")


class LetterTokenizer:
    """Token i is letter i of the alphabet."""

    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(97 + token) for token in token_ids)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", (), "abcdef"),
        ("abcdef", ("cd",), "ab"),
        ("abcabd", ("abd",), "abc"),
        ("aab", ("ab", "b"), "a"),
        ("abc", ("cd",), "abc"),
        ("abc", ("a",), ""),
    ],
)
def test_text_is_cut_before_a_stop_text(text, stop, expected):
    """Whatever the boundary between tokens, the stop text and what follows never come out."""
    stream = TextStream(LetterTokenizer(), stop)
    pieces = []
    for token in LetterTokenizer().encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (expected != text)


def test_streamed_pieces_add_up_to_the_decoded_text(folder):
    """Pieces of several sequences, bytes of split characters included, join to what the tokenizer decodes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, engine = tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4, max_num_batched_tokens=16))
    engine.tokenizer = tokenizer
    pieces = dict.fromkeys(range(len(PROMPTS)), "")

    def collect(prompt_idx, piece):
        pieces[prompt_idx] += piece

    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24), on_text=collect)
    for prompt_idx, completion in enumerate(completions):
        assert completion.text == pieces[prompt_idx] == tokenizer.decode(completion.token_ids)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        ([[]], SamplingParams(), InvalidRequest, "prompt 0"),
        ([[1], [-5]], SamplingParams(), InvalidRequest, "prompt 1"),
        ([[1] * 512], SamplingParams(), InvalidRequest, "max_model_len=512"),
        ([[1]], SamplingParams(stop=("x",)), InvalidRequest, "tokenizer"),
        ([[1]], [], InvalidRequest, "one for each"),
        ([[VOCAB_SIZE]], SamplingParams(), InvalidRequest, "vocabulary"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(engine, prompts, params, error, says):
    """One bad prompt refuses the call with a line that says which; nothing ran and the engine still works."""
    with pytest.raises(error, match=says):
        engine.generate(prompts, params)
    assert engine.stats.num_steps == 0
    assert len(engine.generate([[1]], SamplingParams(max_new_tokens=2))[0].token_ids) == 2


def test_a_prompt_that_never_fits_says_what_would(folder):
    """Too little memory for one sequence is refused with the longest length that fits."""
    config = EngineConfig(60_000, block_size=4, max_num_batched_tokens=16)
    engine = tiny_engine(folder, "float32", config)[1]
    longest = engine.plan.longest_sequence()
    with pytest.raises(NeverFits, match=f"at most {longest} tokens fit"):
        engine.generate([[1] * longest], SamplingParams(max_new_tokens=1))
    engine.generate([[1] * (longest - 2)], SamplingParams(max_new_tokens=2))
    with pytest.raises(SpecError, match="memory"):
        tiny_engine(folder, "float32", EngineConfig(1_000, block_size=4))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"stop": "END"},
        {"seed": 2**70},
        {"top_k": 1.5},
        {"max_new_tokens": 2.5},
        {"temperature": 1e-40},
    ],
)
def test_a_wrong_sampling_parameter_names_itself(values):
    """Each value out of range is refused by name."""
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)


def test_generation_ends_at_the_models_length(folder):
    """A sequence that reaches max_model_len ends with reason length, however many new tokens were asked for."""
    config = EngineConfig(2**22, block_size=4, max_num_batched_tokens=16, max_model_len=20)
    completion = tiny_engine(folder, "float32", config)[1].generate([[1] * 15], SamplingParams(max_new_tokens=10**15))[
        0
    ]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    with pytest.raises(InvalidRequest, match="max_model_len"):
        tiny_engine(folder, "float32", EngineConfig(2**22, max_model_len=513))


def test_an_interrupted_run_leaves_an_engine_that_works(engine):
    """Ctrl-C in the middle of a run frees every row and block."""
    expected = [o.token_ids for o in engine.generate(PROMPTS, SamplingParams(max_new_tokens=6))]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=6), on_step=_interrupt)
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0
    assert [o.token_ids for o in engine.generate(PROMPTS, SamplingParams(max_new_tokens=6))] == expected


def _interrupt(_stats):
    raise KeyboardInterrupt


def test_more_prompts_than_rows_all_finish(folder):
    """Thirty prompts through three rows give what each gives alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in rng.integers(1, 30, 30)]
    config = EngineConfig(2**22, block_size=4, max_num_batched_tokens=16, max_num_seqs=3, preempt_every=5)
    engine = tiny_engine(folder, "float32", config)[1]
    together = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=8))]
    alone = [engine.generate([prompt], SamplingParams(max_new_tokens=8))[0].token_ids for prompt in prompts]
    assert together == alone


def _attention_call(**changes):
    tensor = torch.zeros(1, 2, 1, 4)
    module = torch.nn.Module()
    module.layer_idx = 0
    arguments = {"attention_mask": None, "hybridkv_step": ForwardStep.__new__(ForwardStep)} | changes
    if "layer_idx" in arguments:
        module.layer_idx = arguments.pop("layer_idx")
    if arguments.pop("module_is_causal", True) is False:
        module.is_causal = False
    return paged_attention(module, tensor, tensor, tensor, **arguments)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "mask of its own"),
        ({"is_causal": False}, "not plainly causal"),
        ({"module_is_causal": False}, "not plainly causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sinks": torch.zeros(1)}, "sinks"),
        ({"block_indices": torch.zeros(1)}, "block_indices"),
        ({"layer_idx": None}, "layer_idx"),
        ({"layer_idx": -1}, "layer_idx"),
        ({"hybridkv_step": None}, "keyword arguments"),
    ],
)
def test_a_model_with_attention_of_its_own_is_refused(changes, says):
    """A mask, a bias, a layer without index or a hidden step is refused, never ignored."""
    with pytest.raises(UnsupportedModel, match=says):
        _attention_call(**changes)


def test_a_spec_that_does_not_match_the_model_is_refused(folder):
    """Keys of another shape than the spec's are refused with both shapes."""
    _, engine = tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4))
    other = make_tiny("gemma3_text", folder.parent / "other", fields={"head_dim": 16, "query_pre_attn_scalar": 16})
    other_model, _ = tiny_engine(other, "float32", EngineConfig(2**22, block_size=4))
    engine.model._model = other_model
    with pytest.raises(UnsupportedModel, match=r"\(2, 16\).*\(2, 24\)"):
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=1))


def test_layer_params_default_to_plain_attention():
    """Without softcap and sinks a layer is plain scaled attention."""
    assert LayerParams(0.5) == LayerParams(0.5, None, None)


def test_a_model_that_was_switched_back_still_uses_the_cache(folder):
    """After the model got Hugging Face's attention back, the next run takes the cache again and gives the same."""
    model, engine = tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4, prefix_caching=False))
    expected = [o.token_ids for o in engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))]
    model.set_attn_implementation("sdpa")
    assert [o.token_ids for o in engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))] == expected


def test_a_layer_that_bypasses_the_cache_is_refused(folder):
    """A layer whose attention does not come through the interface is named, instead of generating nonsense."""
    model, engine = tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4))
    attention = model.model.layers[2].self_attn
    attention.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with pytest.raises(UnsupportedModel, match=r"layers \[2\]"):
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=1))


def test_a_rope_that_follows_the_batch_is_refused_past_its_length(tmp_path):
    """Frequencies that change with the longest sequence of a batch are refused; up to that length the model runs."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    folder = make_tiny("phi3", tmp_path / "phi3", fields=fields)
    with pytest.raises(UnsupportedModel, match="max_model_len=64"):
        tiny_engine(folder, "float32", EngineConfig(2**22, block_size=4))
    config = EngineConfig(2**22, block_size=4, max_num_batched_tokens=16, max_model_len=64)
    model, engine = tiny_engine(folder, "float32", config)
    prompts = [[1, 2, 3] * 4, list(range(50))]
    outputs = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=8))]
    assert verify_greedy(model, prompts, outputs, StopRules([8, 8])).equal


def test_the_tall_projection_gives_the_same_logits_and_leaves_the_head_alone():
    """`W @ x.T` equals `linear` up to rounding for any number of rows, and the head is its own again afterwards."""
    torch.manual_seed(0)
    head = torch.nn.Linear(24, 500, bias=False)
    for num_rows in (1, 2, 7):
        hidden = torch.randn(1, num_rows, 24)
        with tall_projection(head):
            assert "forward" in head.__dict__
            tall = head(hidden)
        assert "forward" not in head.__dict__
        torch.testing.assert_close(tall, head(hidden), rtol=1e-5, atol=1e-5)
    other = torch.nn.Linear(24, 500, bias=True)
    with tall_projection(other), tall_projection(None):
        assert "forward" not in other.__dict__


def test_an_arena_that_cannot_be_had_says_how_much(folder):
    """Memory that the machine does not have is an error with the size, not an allocator's trace."""
    with pytest.raises(MemoryError, match=r"arena: 4096\.00 TiB cannot be allocated"):
        tiny_engine(folder, "float32", EngineConfig(2**52, block_size=2**13, max_model_len=512))
