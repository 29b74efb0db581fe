"""The KV-cache manager for hybrid language models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridkv.admission import Admission, Reservation, Verdict
    from hybridkv.block_pool import BlockPool
    from hybridkv.block_table import BlockTable
    from hybridkv.cache_events import AllCleared, BlocksRemoved, BlocksStored, EventBatch
    from hybridkv.cache_metrics import CacheMetrics
    from hybridkv.capacity import (
        MixedCapacity,
        Waste,
        longest_context,
        max_concurrency,
        measure_waste,
        mixed_capacity,
    )
    from hybridkv.copy_list import BlockCopies
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
    from hybridkv.limits import BatchLimits, KernelConstraints, Load
    from hybridkv.manager import CacheManager, ManagerOptions
    from hybridkv.options import CacheOptions, apply_options
    from hybridkv.plan import CachePlan, GroupPlan, SlotMappingMode
    from hybridkv.planner import describe_cache, plan_cache
    from hybridkv.ranks import plan_ranks, split_layers
    from hybridkv.report import (
        FitReport,
        PlanOptions,
        PlanReport,
        SpecReport,
        compare_reports,
        fit_report,
        plan_report,
        spec_report,
    )
    from hybridkv.resume_policy import ResumePolicy
    from hybridkv.row_lengths import RowState
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

# Imported on first use: a plan of a known model starts in half a second, without what it does not need.
_NAMES = {
    "hybridkv.admission": ("Admission", "Reservation", "Verdict"),
    "hybridkv.block_pool": ("BlockPool",),
    "hybridkv.block_table": ("BlockTable",),
    "hybridkv.cache_events": ("AllCleared", "BlocksRemoved", "BlocksStored", "EventBatch"),
    "hybridkv.cache_metrics": ("CacheMetrics",),
    "hybridkv.capacity": (
        "MixedCapacity",
        "Waste",
        "longest_context",
        "max_concurrency",
        "measure_waste",
        "mixed_capacity",
    ),
    "hybridkv.copy_list": ("BlockCopies",),
    "hybridkv.errors": (
        "CheckpointError",
        "HybridKVError",
        "InvalidRequest",
        "InvariantError",
        "NeverFits",
        "OutOfBlocks",
        "OutOfRows",
        "SpecError",
        "UnsupportedModel",
    ),
    "hybridkv.grouping": (
        "KVCacheGroup",
        "group_layers",
    ),
    "hybridkv.hf_config": ("model_spec_from_config",),
    "hybridkv.limits": (
        "BatchLimits",
        "KernelConstraints",
        "Load",
    ),
    "hybridkv.manager": ("CacheManager", "ManagerOptions"),
    "hybridkv.options": (
        "CacheOptions",
        "apply_options",
    ),
    "hybridkv.plan": (
        "CachePlan",
        "GroupPlan",
        "SlotMappingMode",
    ),
    "hybridkv.planner": (
        "describe_cache",
        "plan_cache",
    ),
    "hybridkv.ranks": (
        "plan_ranks",
        "split_layers",
    ),
    "hybridkv.report": (
        "FitReport",
        "PlanOptions",
        "PlanReport",
        "SpecReport",
        "compare_reports",
        "fit_report",
        "plan_report",
        "spec_report",
    ),
    "hybridkv.resume_policy": ("ResumePolicy",),
    "hybridkv.row_lengths": ("RowState",),
    "hybridkv.specs": (
        "CacheTensor",
        "ChunkedAttention",
        "CrossAttention",
        "FullAttention",
        "LayerCache",
        "LayerSpec",
        "ModelSpec",
        "SlidingWindow",
        "State",
        "known_models",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Admission",
    "AllCleared",
    "BatchLimits",
    "BlockCopies",
    "BlockPool",
    "BlockTable",
    "BlocksRemoved",
    "BlocksStored",
    "CacheManager",
    "CacheMetrics",
    "CacheOptions",
    "CachePlan",
    "CacheTensor",
    "CheckpointError",
    "ChunkedAttention",
    "CrossAttention",
    "EventBatch",
    "FitReport",
    "FullAttention",
    "GroupPlan",
    "HybridKVError",
    "InvalidRequest",
    "InvariantError",
    "KVCacheGroup",
    "KernelConstraints",
    "LayerCache",
    "LayerSpec",
    "Load",
    "ManagerOptions",
    "MixedCapacity",
    "ModelSpec",
    "NeverFits",
    "OutOfBlocks",
    "OutOfRows",
    "PlanOptions",
    "PlanReport",
    "Reservation",
    "ResumePolicy",
    "RowState",
    "SlidingWindow",
    "SlotMappingMode",
    "SpecError",
    "SpecReport",
    "State",
    "UnsupportedModel",
    "Verdict",
    "Waste",
    "apply_options",
    "compare_reports",
    "describe_cache",
    "fit_report",
    "group_layers",
    "known_models",
    "longest_context",
    "max_concurrency",
    "measure_waste",
    "mixed_capacity",
    "model_spec_from_config",
    "plan_cache",
    "plan_ranks",
    "plan_report",
    "spec_report",
    "split_layers",
]


def __getattr__(name: str) -> object:
    """Return a name of a module that is imported on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
