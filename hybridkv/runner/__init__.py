"""Runners: they drive real Hugging Face checkpoints through the cache."""

from hybridkv.runner.engine import Engine, EngineConfig, EngineStats, GroupStats
from hybridkv.runner.sequence import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "GroupStats", "SamplingParams"]
