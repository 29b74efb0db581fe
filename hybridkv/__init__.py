"""The KV-cache manager for hybrid language models."""

from hybridkv.block_pool import BlockPool
from hybridkv.block_table import BlockTable
from hybridkv.errors import (
    CheckpointError,
    HybridKVError,
    InvalidRequest,
    InvariantError,
    NeverFits,
    OutOfBlocks,
    OutOfRows,
    SpecError,
    UnsupportedModel,
)
from hybridkv.grouping import KVCacheGroup, group_layers
from hybridkv.hf_config import model_spec_from_config
from hybridkv.manager import CacheManager, Reservation, RowState, Verdict
from hybridkv.planner import BatchLimits, CachePlan, GroupPlan, SlotMappingMode, plan_cache
from hybridkv.specs import (
    CacheTensor,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    State,
    known_models,
)

__version__ = "0.1.0"

__all__ = [
    "BatchLimits",
    "BlockPool",
    "BlockTable",
    "CacheManager",
    "CachePlan",
    "CacheTensor",
    "CheckpointError",
    "ChunkedAttention",
    "CrossAttention",
    "FullAttention",
    "GroupPlan",
    "HybridKVError",
    "InvalidRequest",
    "InvariantError",
    "KVCacheGroup",
    "LayerCache",
    "LayerSpec",
    "ModelSpec",
    "NeverFits",
    "OutOfBlocks",
    "OutOfRows",
    "Reservation",
    "RowState",
    "SlidingWindow",
    "SlotMappingMode",
    "SpecError",
    "State",
    "UnsupportedModel",
    "Verdict",
    "group_layers",
    "known_models",
    "model_spec_from_config",
    "plan_cache",
]
