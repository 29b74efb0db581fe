"""Claims about configs that went wrong somewhere between the authors and the reader."""

import copy
import random

import pytest

from hybridkv.errors import SpecError
from hybridkv.hf_config import model_spec_from_config
from hybridkv.specs import ModelSpec
from tests.config_cases import FACT_NAMES, RESAVED_NAMES, Config, facts

MUTANTS_PER_MODEL = 30
JUNK = [
    *(None, 0, -1, 1, 3, 7, 10**12, 2**70, 1.5, float("inf"), float("nan"), True, False),
    *("", "x", "0", "LLG", "M*-E?", "full_attention", "auto", "\n", "\u2028"),
    *([], [1], [0], [None], ["sliding_attention"], ["linear_attention"], [[]], [{}]),
    *({}, {"0": {}}, {"0": {"head_dim": 0}}, {"00": {"sliding_window": 0}}, {"model_type": "llama"}, {"a": {"b": 1}}),
]
FIELDS = [
    *("attention_chunk_size", "attn_layer_indices", "block_configs", "cross_attention_layers", "full_attn_idxs"),
    *("head_dim", "hybrid_override_pattern", "index_topk", "kv_lora_rank", "layer_types", "layers_block_type"),
    *("linear_attn_config", "max_window_layers", "model_type", "no_rope_layers", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "num_kv_shared_layers", "per_layer_config", "sliding_window"),
    *("sliding_window_pattern", "text_config", "use_cla", "use_sliding_window", "vision_config"),
]


def mutate(config: Config, rng: random.Random) -> None:
    """Break one field of a config, or of one of its nested objects."""
    nested = [value for value in config.values() if isinstance(value, dict)]
    target: Config = rng.choice(nested) if nested and rng.random() < 0.6 else config
    names = sorted({*target, *FIELDS}, key=str)
    name = rng.choice(sorted(target, key=str) if target and rng.random() < 0.75 else names)
    value = target.get(name)
    how = rng.randrange(8)
    if how == 0:
        target.pop(name, None)
    elif how == 1:
        other = rng.choice(names)
        target[name], target[other] = target.get(other), value
    elif how == 2 and isinstance(value, list | str) and value:
        cut = rng.randrange(len(value))
        target[name] = rng.choice([value[:cut], value + value, value[::-1]])
    elif how == 3 and isinstance(value, list) and value:
        value[rng.randrange(len(value))] = rng.choice(JUNK)
    elif how == 4 and isinstance(value, int):
        target[name] = rng.choice([-value, value + 1, value * 10**6, value / 2, str(value), [value]])
    elif how == 5:
        config["text_config"] = {**config}
    elif how == 6 and isinstance(value, dict):
        target[name] = rng.choice([list(value), {"0": value}, None])
    else:
        target[name] = copy.deepcopy(rng.choice(JUNK))


def mutants(name: str) -> list[Config]:
    """Return broken copies of a model's config, the same ones in every run."""
    rng = random.Random(name)
    originals = [facts(name, folder)["config"] for folder in ["", "resaved"][: 1 + (name in RESAVED_NAMES)]]
    made = []
    for _ in range(MUTANTS_PER_MODEL):
        config = copy.deepcopy(rng.choice(originals))
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(config, rng)
        made.append(config)
    return made


@pytest.mark.parametrize("name", FACT_NAMES)
def test_a_mutated_config_gives_a_spec_or_one_line(name: str) -> None:
    """Fields deleted, nulled, retyped, swapped, cut, nested give a valid spec or a one-line SpecError, nothing else."""
    for config in mutants(name):
        try:
            outcome: ModelSpec | str = model_spec_from_config(config, name=name)
        except SpecError as error:
            outcome = str(error)
        if isinstance(outcome, str):
            assert outcome.startswith("config of ")
            assert ": got " in outcome
            assert ";" in outcome
            assert len(outcome.splitlines()) == 1
        else:
            assert all(cache.bytes_per_token + cache.bytes_per_sequence > 0 for _, _, cache in outcome.owned_caches())
            assert ModelSpec.from_json(outcome.to_json()) == outcome


def test_most_mutants_are_refused_and_some_are_read() -> None:
    """The mutations reach both outcomes, in numbers that make the fuzz worth its name."""
    refused = 0
    for name in FACT_NAMES:
        for config in mutants(name):
            try:
                model_spec_from_config(config, name=name)
            except SpecError:
                refused += 1
    total = MUTANTS_PER_MODEL * len(FACT_NAMES)
    assert total >= 2000
    assert total // 5 < refused < total * 4 // 5
