"""Runners: they drive real Hugging Face checkpoints through the cache."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError("hybridkv.runner needs transformers: install it with `pip install 'hybridkv[run]'`")

from hybridkv.runner.beams import Beam, BeamParams
from hybridkv.runner.config import EngineConfig
from hybridkv.runner.drafting import PromptLookup
from hybridkv.runner.engine import Engine
from hybridkv.runner.sequence import Completion, SamplingParams, StepOutput
from hybridkv.runner.stats import EngineStats, GroupStats

__all__ = [
    "Beam",
    "BeamParams",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "GroupStats",
    "PromptLookup",
    "SamplingParams",
    "StepOutput",
]
