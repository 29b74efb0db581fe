"""Claims about `hybridkv run`."""

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridkv.cli import generate, run
from hybridkv.runner import Completion, Engine
from hybridkv.runner.tiny import make_tiny
from hybridkv.runner.tiny_configs import VOCAB_SIZE
from tests.run.cli_harness import ROOT, Run, cli_in_process, run_json, start_process

PROMPT = "A window slides over this prompt."
GROUP_KEYS = {
    "lifecycle", "num_layers", "block_size", "num_blocks", "peak_blocks", "peak_blocks_per_row",
    "num_blocks_freed_out_of_window", "cached_blocks",
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A windowed model with a tokenizer."""
    return str(make_tiny("gemma3_text", tmp_path_factory.mktemp("gemma3"), tokenizer=True))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a tokenizer."""
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    return cli_in_process(capsys)


def test_json_says_everything_about_a_run(cli: Run, gemma3: str) -> None:
    """The JSON object has every documented key; windows freed blocks, preemptions happened, Hugging Face agrees."""
    result = run_json(
        cli, gemma3, PROMPT, "b", "c", "--max-new-tokens", 24, "--preempt-every", 5, "--block-size", 4, "--verify"
    )
    assert set(result) == {"model", "outputs", "stats", "verify"}
    assert result["model"] == gemma3
    assert [output["prompt"] for output in result["outputs"]] == [PROMPT, "b", "c"]
    for output in result["outputs"]:
        assert set(output) == {
            "prompt", "token_ids", "text", "num_prompt_tokens", "num_cached_tokens", "finish_reason"
        }  # fmt: skip
        assert len(output["token_ids"]) == 24
        assert output["finish_reason"] == "length"
        assert isinstance(output["text"], str)
    assert result["outputs"][0]["num_prompt_tokens"] == len(PROMPT)
    assert set(result["stats"]) == {
        "tokens_per_second", "num_preemptions", "num_steps", "num_computed_tokens", "num_hit_tokens", "groups"
    }  # fmt: skip
    assert result["stats"]["num_preemptions"] > 0
    assert [set(group) for group in result["stats"]["groups"]] == [GROUP_KEYS, GROUP_KEYS]
    freed = {g["lifecycle"]: g["num_blocks_freed_out_of_window"] for g in result["stats"]["groups"]}
    assert freed["sliding_window"] > 0
    assert freed["full_attention"] == 0
    assert result["verify"] == {"equal": True, "first_difference": None, "ties": result["verify"]["ties"]}


def test_json_is_all_of_stdout(gemma3: str) -> None:
    """As a process of its own, the command writes one JSON object on stdout, the table on stderr."""
    process = start_process("run", gemma3, "a", "--json", "--stats", "--max-new-tokens", "3")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(json.loads(out)["outputs"][0]["token_ids"]) == 3
    assert "sliding_window" in err
    assert "warn" not in err.lower()
    assert "Traceback" not in err


def test_noise_of_libraries_stays_off_stdout(cli: Run, gemma3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library prints while the command works goes to stderr."""
    honest = Engine.generate

    def noisy(self: Engine, *arguments: object, **options: object) -> list[Completion]:
        print("noise")
        warnings.warn("more noise", stacklevel=1)
        return honest(self, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", noisy)
    code, out, err = cli("run", gemma3, "a", "--json", "--max-new-tokens", 1)
    assert (code, err) == (0, "noise\n")
    json.loads(out)


def test_text_of_one_prompt_is_streamed(cli: Run, gemma3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt's text is written piece by piece; together the pieces are the text of the JSON form."""
    pieces: list[str] = []
    writer = generate._writer

    def spying(out: io.TextIOBase) -> Callable[[int, str], None]:
        write = writer(out)
        return lambda prompt_idx, piece: (pieces.append(piece), write(prompt_idx, piece))[1]

    monkeypatch.setattr(generate, "_writer", spying)
    code, out, err = cli("run", gemma3, PROMPT, "--max-new-tokens", 12)
    assert (code, err) == (0, "")
    assert len(pieces) > 1
    assert out == "".join(pieces) + "\n"
    assert out == run_json(cli, gemma3, PROMPT, "--max-new-tokens", 12)["outputs"][0]["text"] + "\n"


def test_texts_of_several_prompts_are_blocks(cli: Run, gemma3: str) -> None:
    """Several prompts are printed one block each, in order, then the outcome of the verification."""
    _, out, _ = cli("run", gemma3, "first", "second", "--max-new-tokens", 4, "--verify")
    assert out.index("[0] first\n -> ") < out.index("[1] second\n -> ")
    assert "verify: equal to Hugging Face (2 prompts, 8 tokens, " in out


def test_stats_table_names_every_group(cli: Run, gemma3: str) -> None:
    """The table has a row per group, then the totals."""
    code, out, _ = cli("run", gemma3, "a", "--max-new-tokens", 4, "--stats")
    assert code == 0
    assert "sliding_window" in out
    assert "full_attention" in out
    assert "4 tokens in 4 steps" in out
    assert "4 tokens computed, 0 found in the cache" in out


def test_prompts_that_begin_alike_are_computed_once(cli: Run, gemma3: str) -> None:
    """One after the other, equal prompts hit the first; --no-prefix-cache computes each, with the same tokens."""
    options = (PROMPT, PROMPT, "--max-num-seqs", 1, "--max-new-tokens", 6, "--block-size", 4, "--verify")
    cached, plain = run_json(cli, gemma3, *options), run_json(cli, gemma3, *options, "--no-prefix-cache")
    num_hit = (len(PROMPT) - 1) // 4 * 4
    assert [output["num_cached_tokens"] for output in cached["outputs"]] == [0, num_hit]
    assert (cached["stats"]["num_hit_tokens"], plain["stats"]["num_hit_tokens"]) == (num_hit, 0)
    assert cached["stats"]["num_computed_tokens"] == plain["stats"]["num_computed_tokens"] - num_hit
    assert all(group["cached_blocks"] == 0 for group in plain["stats"]["groups"])
    assert [o["token_ids"] for o in cached["outputs"]] == [o["token_ids"] for o in plain["outputs"]]
    assert cached["verify"]["equal"]


def test_preempted_sequences_may_wait_on_the_host(cli: Run, gemma3: str) -> None:
    """With --swap nothing is computed twice, even without a prefix cache; other options are taken as well."""
    result = run_json(
        *(cli, gemma3, PROMPT, "b", "c", "--max-new-tokens", 12, "--preempt-every", 4, "--no-prefix-cache"),
        *("--swap", "8MiB", "--watermark", 0.1, "--resume-every", 16, "--verify"),
    )
    assert result["stats"]["num_preemptions"] > 0
    assert result["stats"]["num_computed_tokens"] == len(PROMPT) + 2 + 3 * 11
    assert result["verify"]["equal"]


def test_token_ids_need_no_tokenizer(cli: Run, llama: str, tmp_path: Path) -> None:
    """A checkpoint without tokenizer takes token ids, each with a limit of its own, and gives token ids."""
    prompts = tmp_path / "prompts"
    prompts.write_text('{"token_ids": [1, 2, 3]}\n\n{"token_ids": [4], "max_new_tokens": 2}\n')
    result = run_json(cli, llama, "--prompts-file", prompts, "--max-new-tokens", 5, "--verify")
    assert [len(output["token_ids"]) for output in result["outputs"]] == [5, 2]
    assert [output["num_prompt_tokens"] for output in result["outputs"]] == [3, 1]
    assert {(output["prompt"], output["text"]) for output in result["outputs"]} == {(None, None)}
    assert result["verify"]["equal"]
    code, out, _ = cli("run", llama, "--prompts-file", prompts, "--max-new-tokens", 5)
    assert code == 0
    assert f"-> token ids {' '.join(map(str, result['outputs'][0]['token_ids']))}\n" in out


def test_prompts_come_from_arguments_stdin_and_file(
    cli: Run, gemma3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments come first, - is all of stdin, a file adds a prompt a line without blank ones."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffone\r\n\n two é\n".encode())
    monkeypatch.setattr(sys, "stdin", io.StringIO("line 1\nline 2\n"))
    result = run_json(cli, gemma3, "zero", "-", "--prompts-file", prompts, "--max-new-tokens", 1)
    assert [output["prompt"] for output in result["outputs"]] == ["zero", "line 1\nline 2", "one", " two é"]


def test_seed_makes_sampling_repeatable(cli: Run, gemma3: str) -> None:
    """Equal seeds give equal tokens, other seeds others; equal prompts of one run differ."""
    options = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--max-new-tokens", 8, "--seed")
    outputs = [
        [output["token_ids"] for output in run_json(cli, gemma3, "same", "same", *options, seed)["outputs"]]
        for seed in (1, 1, 5)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]
    assert outputs[0][0] != outputs[0][1]


def test_stop_text_ends_a_completion(cli: Run, gemma3: str) -> None:
    """A completion is cut before the stop text, says so, and still equals Hugging Face's up to there."""
    text = run_json(cli, gemma3, PROMPT, "--max-new-tokens", 30)["outputs"][0]["text"]
    position = next(i for i in range(8, len(text)) if text[i].isascii() and text[i] not in text[:i])
    result = run_json(cli, gemma3, PROMPT, "--max-new-tokens", 30, "--stop", text[position], "--verify")
    assert result["outputs"][0]["text"] == text[:position]
    assert result["outputs"][0]["finish_reason"] == "stop"
    assert result["verify"]["equal"]


def test_end_token_ends_a_completion(cli: Run, gemma3: str, tmp_path: Path) -> None:
    """A completion ends with the end token of the checkpoint, kept in the token ids; Hugging Face agrees."""
    ids = run_json(cli, gemma3, PROMPT, "--max-new-tokens", 10)["outputs"][0]["token_ids"]
    for path in Path(gemma3).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[5]]}))
    result = run_json(cli, tmp_path, PROMPT, "--max-new-tokens", 10, "--verify")
    assert result["outputs"][0]["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert result["outputs"][0]["finish_reason"] == "stop"
    assert result["verify"]["equal"]


def test_completion_ends_at_the_models_length(cli: Run, gemma3: str) -> None:
    """However many tokens are asked for, the sequence ends at max_model_len; Hugging Face is held to the same."""
    result = run_json(cli, gemma3, "abcd", "--max-new-tokens", 10**13, "--max-model-len", 9, "--verify")
    assert len(result["outputs"][0]["token_ids"]) == 5
    assert result["verify"]["equal"]


def test_unequal_output_exits_1(cli: Run, gemma3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that Hugging Face would not generate is named in text, in JSON; the exit code is 1."""
    honest = Engine.generate

    def lying(self: Engine, *arguments: object, **options: object) -> list[Completion]:
        first, *rest = honest(self, *arguments, **options)
        ids = [*first.token_ids[:2], (first.token_ids[2] + 1) % VOCAB_SIZE, *first.token_ids[3:]]
        return [replace(first, token_ids=ids), *rest]

    monkeypatch.setattr(Engine, "generate", lying)
    code, out, _ = cli("run", gemma3, PROMPT, "--max-new-tokens", 5, "--verify")
    assert code == 1
    assert "verify: differs from Hugging Face at prompt 0, token 2: expected token " in out
    code, out, _ = cli("run", gemma3, PROMPT, "--max-new-tokens", 5, "--verify", "--json")
    assert code == 1
    verify = json.loads(out)["verify"]
    assert verify["equal"] is False
    assert set(verify["first_difference"]) == {"prompt_idx", "token_idx", "expected", "got", "gap"}
    assert (verify["first_difference"]["prompt_idx"], verify["first_difference"]["token_idx"]) == (0, 2)


def test_help_needs_no_torch() -> None:
    """The version, the help texts, the library itself import neither torch, triton nor transformers."""
    script = (
        "import sys, hybridkv\n"
        "from hybridkv.cli.main import main\n"
        "codes = [main(a) for a in (['--help'], ['run', '--help'], ['--version'], [])]\n"
        "assert codes == [0] * 4, codes\n"
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--prompts-file" in done.stdout
    assert "hybridkv 0." in done.stdout


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted files go to XDG_CACHE_HOME if that is set, to ~/.cache else."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert run.default_cache_dir() == Path("/somewhere/hybridkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert run.default_cache_dir() == Path.home() / ".cache" / "hybridkv"


@pytest.mark.gemma
def test_demo_model_equals_hugging_face(cli: Run, tmp_path: Path) -> None:
    """The real Gemma 3 270M of the demo extra is assembled, converted, run, then found equal."""
    result = run_json(
        cli, "gemma-3-270m", "The capital of France is", "--cache-dir", tmp_path, "--max-new-tokens", 8, "--verify"
    )
    assert "France" in result["outputs"][0]["text"]
    assert result["verify"]["equal"]
    assert [path.name for path in tmp_path.iterdir()] == ["gguf-v1"]
