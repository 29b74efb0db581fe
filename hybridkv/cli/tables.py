"""Reports as text for people, as JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hybridkv.layouts import LayoutCapacity
from hybridkv.lengths import format_tokens
from hybridkv.report import CacheReport, FitReport, Json, LayerReport, PlanReport, SpecReport
from hybridkv.report.plan import LAYOUT_NAMES
from hybridkv.report.spec import lifecycle_label
from hybridkv.specs import ModelSpec
from hybridkv.units import format_bytes

_WIDTH = 120
_WASTE_TERMS = {
    "needed": "needed_bytes",
    "tails": "tail_bytes",
    "in flight": "in_flight_bytes",
    "padding": "padding_bytes",
    "part slab": "partly_used_slab_bytes",
    "null block": "null_block_bytes",
    "unused": "unused_bytes",
}


def print_json(document: Json) -> None:
    """Print one JSON value."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_plan(report: PlanReport) -> None:
    """Print the plan's groups, its capacity with the waste by term, layouts side by side, the trace's mix."""
    spec = report.plan.spec
    print(
        f"{spec.name} ({spec.model_type}, {spec.num_layers} layers) in {format_bytes(report.memory_bytes)}: "
        f"{report.num_slabs:,} slabs of {format_bytes(report.slab_bytes)}, {_dtypes(spec)}\n"
    )
    _print_groups(report)
    _print_capacity(report)
    _print_layouts(report)
    for entry in report.layouts:
        if entry.note and entry.layout == "hybridkv":
            print(f"{format_tokens(entry.context)}: no sequence fits, {entry.note}")
    if any(_is_beyond(spec, entry.context) for entry in report.capacity):
        print(f"* beyond the model's own length of {spec.max_model_len:,} tokens")
    if report.mixed is not None:
        mixed = report.mixed
        left_out = f" ({mixed.num_too_long:,} longer than max_model_len left out)" if mixed.num_too_long else ""
        print(
            f"trace of {mixed.num_requests:,} requests{left_out}: {mixed.min_concurrency:,} to "
            f"{mixed.max_concurrency:,} at once, {mixed.mean_concurrency:,.1f} on average with "
            f"{mixed.mean_tokens:,.0f} tokens"
        )


def print_fit(report: FitReport) -> None:
    """Print what fits, then the flags."""
    num_tokens = report.max_model_len * report.max_num_seqs
    print(
        f"{report.model} in {format_bytes(report.memory_bytes)}: sequences of up to {report.max_model_len:,} tokens, "
        f"{report.max_num_seqs:,} at once ({num_tokens:,} tokens)"
    )
    print(f"pass {' '.join(report.flags)}")


def print_spec(report: SpecReport) -> None:
    """Print what each kind of layer keeps, then the totals."""
    longest = "any length" if report.max_model_len is None else f"up to {report.max_model_len:,} tokens"
    print(f"{report.model} ({report.model_type}, {len(report.layers)} layers), {longest}\n")
    rows: list[tuple[str, ...]] = []
    for caches, layers in _by_caches(report.layers).items():
        cells = [_cache_cells(cache) for cache in caches] or [("no cache", "", "")]
        rows += [(_ranges(layers) if idx == 0 else "", *own) for idx, own in enumerate(cells)]
    _print_table("", ("layers", "lifecycle", "tensors", ">size"), rows)
    totals = report.totals
    for size, what in (
        (totals.growing_bytes_per_token, "a token of full attention"),
        (totals.windowed_bytes_per_token, "a token inside all windows and chunks"),
        (totals.state_bytes_per_sequence, "of states a sequence"),
        (totals.cross_bytes_per_sequence, "a sequence for its longest source"),
    ):
        if size:
            print(f"{_exact_bytes(size):>15} {what}")


def print_comparison(reports: Sequence[PlanReport]) -> None:
    """Print what each model's plan is made of, then what it holds of each context."""
    print(f"{len(reports)} models, each in {format_bytes(reports[0].memory_bytes)}\n")
    rows = []
    for report in reports:
        spec = report.plan.spec
        groups = ", ".join(f"{g.group.num_layers} {lifecycle_label(g.group.lifecycle)}" for g in report.plan.groups)
        block_size = max((group.block_size for group in report.groups if group.family is None), default=None)
        blocks = "-" if block_size is None else str(block_size)
        rows.append((spec.name, groups, _dtypes(spec), blocks, format_bytes(report.slab_bytes)))
    _print_table("Plans", ("model", "groups", "dtypes", ">block size", ">slab"), rows)
    contexts = sorted({entry.context for report in reports for entry in report.capacity})
    counts = []
    for report in reports:
        own = {entry.context: entry for entry in report.layouts if entry.layout == "hybridkv"}
        marks = ["*" if _is_beyond(report.plan.spec, context) else "" for context in contexts]
        cells = [_layout_cell(own[c]) + mark if c in own else "" for c, mark in zip(contexts, marks, strict=True)]
        counts.append((report.model, *cells))
    headings = [f">{format_tokens(context)}" for context in contexts]
    _print_table("Sequences at once, with their waste, by context", ("model", *headings), counts)
    if any(_is_beyond(report.plan.spec, entry.context) for report in reports for entry in report.capacity):
        print("* beyond the model's own length")


def _print_groups(report: PlanReport) -> None:
    headings = ("lifecycle", ">layers", ">block size", ">parts", ">block", ">blocks a slab", ">padding", ">blocks")
    rows = [
        (
            lifecycle_label(group.group.lifecycle),
            str(group.group.num_layers),
            "-" if group.group.is_state else str(group.block_size),
            str(group.num_parts),
            format_bytes(group.payload_bytes_per_block),
            str(group.blocks_per_slab),
            _percent(group.padding_fraction),
            f"{group.num_blocks:,}",
            f"{group.table_width:,}",
        )
        for group in report.plan.groups
    ]
    _print_table("KV cache groups", (*headings, ">table width"), rows)


def _print_capacity(report: PlanReport) -> None:
    waste_at = {waste.context: waste for waste in report.waste}
    unit, unit_bytes = ("GiB", 2**30) if report.memory_bytes >= 2**30 else ("MiB", 2**20)
    rows = []
    for entry in report.capacity:
        waste = waste_at.get(entry.context)
        terms = [""] * (len(_WASTE_TERMS) + 1)
        if waste is not None:
            terms = [f"{getattr(waste, name) / unit_bytes:,.2f}" for name in _WASTE_TERMS.values()]
            terms.append(_percent(waste.waste_fraction))
        context = _context(report.plan.spec, entry.context)
        rows.append((context, f"{entry.max_concurrency:,}", f"{entry.num_tokens:,}", *terms))
    headings = (">context", ">sequences", ">tokens", *(f">{term}" for term in _WASTE_TERMS), ">waste")
    _print_table(f"Capacity, and where the memory goes in {unit}", headings, rows)


def _print_layouts(report: PlanReport) -> None:
    contexts = [entry.context for entry in report.capacity]
    rows = []
    for layout, name in LAYOUT_NAMES.items():
        entries = [entry for entry in report.layouts if entry.layout == layout]
        cells = [_layout_cell(entry) for entry in entries]
        rows.append((name, str(entries[0].block_size), *cells))
    headings = [f">{_context(report.plan.spec, context)}" for context in contexts]
    _print_table("Sequences at once, with their waste, by layout", ("layout", ">block size", *headings), rows)


def _layout_cell(entry: LayoutCapacity) -> str:
    return f"{entry.max_concurrency:,} ({_percent(entry.waste_fraction)})" if entry.max_concurrency else "0"


def _by_caches(layers: Iterable[LayerReport]) -> dict[tuple[CacheReport, ...], list[int]]:
    """Return the layers that keep the same, by what they keep."""
    layers_of: dict[tuple[CacheReport, ...], list[int]] = {}
    for layer in layers:
        layers_of.setdefault(layer.caches, []).append(layer.layer)
    return layers_of


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as `"0-4, 6-10"`."""
    breaks = [idx for idx, (before, after) in enumerate(pairwise(numbers), start=1) if after != before + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *breaks, len(numbers)])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _cache_cells(cache: CacheReport) -> tuple[str, str, str]:
    parameter = cache.window or cache.chunk or cache.family or cache.max_source_tokens
    lifecycle = cache.lifecycle if parameter is None else f"{cache.lifecycle} {parameter}"
    if cache.shares_kv_with is not None:
        return lifecycle, f"those of layer {cache.shares_kv_with}", ""
    tensors = []
    for tensor in cache.tensors:
        every = "" if tensor.tokens_per_entry is None else f" every {tensor.tokens_per_entry} tokens"
        tensors.append(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}{every}")
    per_sequence = cache.bytes_per_sequence
    size = f"{_exact_bytes(cache.bytes_per_token or 0)} a token" if per_sequence is None else ""
    return lifecycle, ", ".join(tensors), size or f"{_exact_bytes(per_sequence or 0)} a sequence"


def _exact_bytes(size: float) -> str:
    return f"{size:,} B"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _context(spec: ModelSpec, context: int) -> str:
    return format_tokens(context) + "*" * _is_beyond(spec, context)


def _is_beyond(spec: ModelSpec, context: int) -> bool:
    return spec.max_model_len is not None and context > spec.max_model_len


def _dtypes(spec: ModelSpec) -> str:
    """Return the dtypes of tokens and of states, such as `"KV bfloat16, states bfloat16 and float32"`."""
    found: dict[str, dict[str, None]] = {"per_token": {}, "per_sequence": {}}
    for _, _, cache in spec.owned_caches():
        for tensor in cache.tensors:
            found[tensor.kind][tensor.dtype] = None
    kinds = (("KV", found["per_token"]), ("states", found["per_sequence"]))
    return ", ".join(f"{kind} {' and '.join(dtypes)}" for kind, dtypes in kinds if dtypes)


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print an aligned table; a heading that begins with `>` is one of numbers, others may be wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_number = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console() if sys.stdout.isatty() else Console(file=sys.stdout, width=_WIDTH)
    with console.capture() as captured:
        console.print(table, highlight=False)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    print("\n".join([*([title] if title else []), *(line for line in lines if line), ""]))
