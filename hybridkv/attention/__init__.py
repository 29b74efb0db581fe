"""Attention backends: they write a step's keys and values into the cache, then attend over its pages."""

from hybridkv.attention.base import AttentionBackend, GroupBatch, LayerParams, PreparedAttention
from hybridkv.attention.torch_backend import TorchBackend
from hybridkv.attention.triton_backend import TritonBackend

__all__ = ["AttentionBackend", "GroupBatch", "LayerParams", "PreparedAttention", "TorchBackend", "TritonBackend"]
