"""`hybridkv plan`, `fit` and `compare`: parse, plan, print."""

from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli import values
from hybridkv.cli.models import find_model
from hybridkv.cli.tables import print_comparison, print_fit, print_json, print_plan
from hybridkv.cli.terminal import guarded
from hybridkv.lengths import read_lengths
from hybridkv.report import compare_reports, fit_report, plan_report
from hybridkv.report.options import DEFAULT_NUM_BATCHED_TOKENS


def plan(  # noqa: PLR0913  (one argument an option is how typer works)
    model: values.Model,
    memory: values.Memory,
    reserve: values.Reserve = None,
    max_model_len: values.MaxModelLen = None,
    context: values.Context = None,
    max_num_seqs: values.MaxNumSeqs = None,
    max_batched_tokens: values.MaxBatchedTokens = DEFAULT_NUM_BATCHED_TOKENS,
    block_size: values.BlockSize = None,
    kv_dtype: values.KVDtype = None,
    state_dtype: values.StateDtype = None,
    tp: values.TP = 1,
    draft_layers: values.DraftLayers = 0,
    max_source_tokens: values.MaxSourceTokens = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests (JSON lines or CSV) whose mix is to be held.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan to a .png or .svg file.")] = None,
    json: values.JsonFlag = False,
) -> None:
    """Say how many sequences a memory holds, where the bytes go, what other layouts would hold."""

    def action() -> int:
        if plot is not None:
            from hybridkv.report.plots import check_plot_path

            check_plot_path(plot)
        memory_bytes = values.cache_memory(memory, reserve)
        options = values.plan_options(context, max_model_len, max_num_seqs, max_batched_tokens, block_size)
        stored = values.cache_options(kv_dtype, state_dtype, tp, draft_layers, max_source_tokens)
        requests = [] if trace is None else read_lengths(trace)
        report = plan_report(find_model(model, stored), memory_bytes, options, requests)
        if plot is not None:
            from hybridkv.report.plots import draw_plan

            draw_plan(report, plot)
        if json:
            print_json(report.to_dict())
        else:
            print_plan(report)
        return 0

    raise typer.Exit(guarded(action))


def fit(  # noqa: PLR0913
    model: values.Model,
    memory: values.Memory,
    reserve: values.Reserve = None,
    max_model_len: values.MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Find the longest context at which this many sequences fit.")
    ] = None,
    max_batched_tokens: values.MaxBatchedTokens = DEFAULT_NUM_BATCHED_TOKENS,
    block_size: values.BlockSize = None,
    kv_dtype: values.KVDtype = None,
    state_dtype: values.StateDtype = None,
    tp: values.TP = 1,
    draft_layers: values.DraftLayers = 0,
    max_source_tokens: values.MaxSourceTokens = None,
    json: values.JsonFlag = False,
) -> None:
    """Find the largest context and concurrency that fit, with the flags to pass."""

    def action() -> int:
        memory_bytes = values.cache_memory(memory, reserve)
        options = values.plan_options(None, max_model_len, max_num_seqs, max_batched_tokens, block_size)
        stored = values.cache_options(kv_dtype, state_dtype, tp, draft_layers, max_source_tokens)
        report = fit_report(find_model(model, stored), memory_bytes, options)
        if json:
            print_json(report.to_dict())
        else:
            print_fit(report)
        return 0

    raise typer.Exit(guarded(action))


def compare(  # noqa: PLR0913
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=values.MODEL_HELP, show_default=False)],
    memory: values.Memory,
    reserve: values.Reserve = None,
    max_model_len: values.MaxModelLen = None,
    context: values.Context = None,
    max_num_seqs: values.MaxNumSeqs = None,
    max_batched_tokens: values.MaxBatchedTokens = DEFAULT_NUM_BATCHED_TOKENS,
    block_size: values.BlockSize = None,
    kv_dtype: values.KVDtype = None,
    state_dtype: values.StateDtype = None,
    tp: values.TP = 1,
    draft_layers: values.DraftLayers = 0,
    max_source_tokens: values.MaxSourceTokens = None,
    json: values.JsonFlag = False,
) -> None:
    """Show models side by side in the same memory."""

    def action() -> int:
        memory_bytes = values.cache_memory(memory, reserve)
        options = values.plan_options(context, max_model_len, max_num_seqs, max_batched_tokens, block_size)
        stored = values.cache_options(kv_dtype, state_dtype, tp, draft_layers, max_source_tokens)
        reports = compare_reports([find_model(model, stored) for model in models], memory_bytes, options)
        if json:
            print_json([report.to_dict() for report in reports])
        else:
            print_comparison(reports)
        return 0

    raise typer.Exit(guarded(action))
