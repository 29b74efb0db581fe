"""The main job on the real Gemma 3 270M weights."""

import json
from pathlib import Path

import pytest

from tests.run.cli_harness import cli_in_process

ROOT = Path(__file__).parents[2]
LENGTHS = (3, 14, 64, 200, 513, 1024, 1700, 2300)
BUDGET = 128
pytestmark = pytest.mark.gemma


@pytest.fixture(autouse=True)
def one_thread():
    """Use every core: this model is no tiny one."""
    return


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    """Eight prompts of text, cut to exact lengths and given as token ids."""
    from hybridkv.cli.run import default_cache_dir
    from hybridkv.runner.checkpoints import DEMO_MODEL, load_checkpoint, resolve_checkpoint

    tokenizer = load_checkpoint(resolve_checkpoint(DEMO_MODEL, default_cache_dir()), "float32").tokenizer
    license_ids = tokenizer.encode((ROOT / "LICENSE").read_text())
    story_ids = tokenizer.encode("The history of the steam engine begins in the first century, when a Greek inventor")
    path = tmp_path_factory.mktemp("gemma") / "prompts.jsonl"
    sources = [story_ids if length <= 14 else license_ids for length in LENGTHS]
    lines = [json.dumps({"token_ids": ids[:length]}) for ids, length in zip(sources, LENGTHS, strict=True)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("block_size", [16, 32])
def test_eight_prompts_equal_hugging_face_under_pressure(block_size, prompts_file, capsys):
    """Prompts of 3 to 2,300 tokens together, too little memory, windows crossed: every token is Hugging Face's."""
    run = cli_in_process(capsys)
    code, out, _ = run(
        *("run", "gemma-3-270m", "--prompts-file", prompts_file, "--max-new-tokens", 128, "--block-size", block_size),
        *("--max-batched-tokens", BUDGET, "--memory", "110MiB", "--verify", "--json"),
    )
    result = json.loads(out)
    assert code == 0
    assert result["verify"] == {"equal": True, "first_difference": None, "ties": []}
    assert [output["num_prompt_tokens"] for output in result["outputs"]] == list(LENGTHS)
    assert result["stats"]["num_preemptions"] >= 3
    sliding, full = result["stats"]["groups"]
    assert (sliding["num_layers"], full["num_layers"]) == (15, 3)
    assert sliding["peak_blocks_per_row"] <= -(-(511 + BUDGET) // block_size) + 1
