"""What a model's caches cost, what a memory holds of them: the objects that the command line prints as JSON."""

from hybridkv.report.document import Json, to_dict
from hybridkv.report.fit import FitReport, fit_report
from hybridkv.report.options import PlanOptions
from hybridkv.report.plan import (
    ContextCapacity,
    GroupReport,
    MixedLoad,
    PlanReport,
    compare_reports,
    measure_plan,
    plan_report,
)
from hybridkv.report.search import make_plan
from hybridkv.report.spec import (
    CacheReport,
    CacheTotals,
    LayerReport,
    SpecReport,
    TensorReport,
    cache_totals,
    spec_report,
)

__all__ = [
    "CacheReport",
    "CacheTotals",
    "ContextCapacity",
    "FitReport",
    "GroupReport",
    "Json",
    "LayerReport",
    "MixedLoad",
    "PlanOptions",
    "PlanReport",
    "SpecReport",
    "TensorReport",
    "cache_totals",
    "compare_reports",
    "fit_report",
    "make_plan",
    "measure_plan",
    "plan_report",
    "spec_report",
    "to_dict",
]
