"""Runners: they drive real Hugging Face checkpoints through the cache."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError("hybridkv.runner needs transformers: install it with `pip install 'hybridkv[run]'`")

from hybridkv.runner.engine import Engine, EngineConfig, EngineStats, GroupStats
from hybridkv.runner.sequence import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "GroupStats", "SamplingParams"]
