"""A plan as two pictures: a sequence's memory over its length, layouts side by side."""

from collections.abc import Sequence
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvalidRequest
from hybridkv.lengths import format_tokens
from hybridkv.plan import CachePlan
from hybridkv.report.plan import LAYOUT_NAMES, PlanReport
from hybridkv.report.spec import lifecycle_label
from hybridkv.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SUFFIXES = (".png", ".svg")
_NUM_LENGTHS = 200
_HEADROOM = 1.3  # room for the legend above the data
_GROUP_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
_LAYOUT_COLORS = ("#c8c8c8", "#9a9a9a", "#6d6d6d", "#454545", "#0072b2")
_SIZE_INCHES, _DPI = (13, 5), 150


def check_plot_path(path: Path) -> None:
    """Check that a plot can be made before any work is done.

    Raises: InvalidRequest if the suffix is no picture's or matplotlib is not installed.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot: got {str(path)!r}, expected a file that ends in {' or '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise InvalidRequest("--plot: needs matplotlib; install the plot extra with pip install 'hybridkv[plot]'")


def memory_by_group(plan: CachePlan, lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes of the blocks that one decoding sequence holds.

    Shapes: returns [num_groups, len(lengths)]
    """
    in_flight = plan.limits.decode_in_flight
    held = [
        [group.max_blocks(length, in_flight) * group.block_stride_bytes for length in lengths] for group in plan.groups
    ]
    return np.array(held, dtype=np.int64)


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write both pictures of a plan to a PNG or SVG file.

    Raises: InvalidRequest if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.model} in {format_bytes(report.memory_bytes)}", fontweight="bold")
    left, right = figure.subplots(1, 2)
    _draw_memory(left, report.plan)
    _draw_layouts(right, report)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidRequest(f"--plot: {str(path)!r} cannot be written ({error.strerror}); give another file") from None


def _draw_memory(axes: "Axes", plan: CachePlan) -> None:
    longest = plan.limits.max_model_len
    lengths = np.unique(np.geomspace(min(64, longest), longest, _NUM_LENGTHS).astype(np.int64))
    held = memory_by_group(plan, lengths.tolist())
    scale, unit = (2**30, "GiB") if held.sum(axis=0).max() >= 2**30 else (2**20, "MiB")
    labels = [lifecycle_label(group.group.lifecycle) for group in plan.groups]
    colors = [_GROUP_COLORS[idx % len(_GROUP_COLORS)] for idx in range(len(labels))]
    axes.stackplot(lengths, held / scale, labels=labels, colors=colors, alpha=0.9)
    axes.set_xscale("log", base=2)
    powers = range(int(log2(lengths[0])), int(log2(longest)) + 1)
    step = 1 + len(powers) // 9
    ticks = [2**power for power in powers if (powers[-1] - power) % step == 0]
    axes.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    axes.set_xlim(int(lengths[0]), longest)
    axes.set_ylim(0, held.sum(axis=0).max() / scale * _HEADROOM)
    axes.set(title="Memory of one sequence, by group", xlabel="tokens in the sequence", ylabel=unit)
    axes.grid(axis="y", alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", frameon=False)


def _draw_layouts(axes: "Axes", report: PlanReport) -> None:
    contexts = [entry.context for entry in report.capacity]
    names = list(LAYOUT_NAMES)
    width = 0.84 / len(names)
    most = max((entry.num_tokens for entry in report.layouts), default=0)
    scale, unit = (2**20, "Mi tokens") if most >= 2**20 else (2**10, "Ki tokens")
    for idx, name in enumerate(names):
        entries = [entry for entry in report.layouts if entry.layout == name]
        places = [contexts.index(entry.context) + (idx - (len(names) - 1) / 2) * width for entry in entries]
        heights = [entry.num_tokens / scale for entry in entries]
        axes.bar(places, heights, width * 0.92, label=LAYOUT_NAMES[name], color=_LAYOUT_COLORS[idx])
        for place, height, entry in zip(places, heights, entries, strict=True):
            waste = f"{100 * entry.waste_fraction:.1f} %" if entry.max_concurrency else "none fits"
            axes.annotate(
                waste, (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=7, rotation=90
            )
    axes.set_xticks(range(len(contexts)), [format_tokens(context) for context in contexts])
    axes.set_ylim(0, max(1, most) / scale * _HEADROOM)
    axes.set(title="Tokens that fit, with the waste, by layout", xlabel="tokens in each sequence", ylabel=unit)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", frameon=False, ncols=3)
