"""The options that planning commands share, from their text to checked values."""

from enum import StrEnum
from typing import Annotated

import typer
from pydantic import ValidationError

from hybridkv.errors import InvalidRequest
from hybridkv.lengths import parse_tokens
from hybridkv.options import CacheOptions
from hybridkv.report import PlanOptions
from hybridkv.spec_base import readable_errors
from hybridkv.units import format_bytes, parse_bytes


class CacheDtype(StrEnum):
    """Dtypes of caches; fp8 is short for float8_e4m3fn."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"


MODEL_HELP = "config.json, folder with one, model spec, known name (hybridkv spec --list) or Hugging Face Hub id."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Bytes for caches, without weights, such as 80GiB (2^30) or 80GB (10^9).",
        show_default=False,
    ),
]
Reserve = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of --memory to leave alone.")]
MaxModelLen = Annotated[
    str | None, typer.Option(metavar="N", help="Tokens of the longest sequence, such as 128K. (default: the model's)")
]
Context = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="Lengths to plan for. (default: 8K,32K,128K and the model's)"),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(metavar="N", help="Most sequences at once. (default: what fits, tables for 256)")
]
MaxBatchedTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of one step.")]
BlockSize = Annotated[int | None, typer.Option(metavar="N", help="Tokens a block. (default: the planner's choice)")]
KVDtype = Annotated[CacheDtype | None, typer.Option(help="Of K, V and latents. (default: bfloat16)")]
StateDtype = Annotated[CacheDtype | None, typer.Option(help="Of recurrent states. (default: float32)")]
TP = Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks; the plan is of one rank.")]
DraftLayers = Annotated[int, typer.Option(metavar="N", help="Layers of a multi-token-prediction draft.")]
MaxSourceTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Longest source of cross attention. (default: the model's)")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def cache_options(
    kv_dtype: CacheDtype | None,
    state_dtype: CacheDtype | None,
    tp: int,
    draft_layers: int,
    max_source_tokens: int | None,
) -> CacheOptions:
    """Return how caches are stored.

    Raises: InvalidRequest for a number that is out of range.
    """
    values: dict[str, object] = {"tp_size": tp, "draft_layers": draft_layers, "max_source_tokens": max_source_tokens}
    for name, dtype in (("kv_dtype", kv_dtype), ("state_dtype", state_dtype)):
        if dtype is not None:
            values[name] = (CacheDtype.FLOAT8_E4M3FN if dtype is CacheDtype.FP8 else dtype).value
    try:
        return CacheOptions.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest("; ".join(readable_errors(error))) from None


def cache_memory(memory: str, reserve: str | None) -> int:
    """Return the bytes for caches.

    Raises: SpecError for what is no size; InvalidRequest if nothing is left beside the reserve.
    """
    memory_bytes = parse_bytes(memory)
    reserve_bytes = 0 if reserve is None else parse_bytes(reserve)
    if reserve_bytes >= memory_bytes:
        raise InvalidRequest(
            f"--reserve: got {format_bytes(reserve_bytes)} of --memory {format_bytes(memory_bytes)}, "
            "which leaves nothing for caches; reserve less"
        )
    return memory_bytes - reserve_bytes


def plan_options(
    context: str | None,
    max_model_len: str | None,
    max_num_seqs: int | None,
    max_batched_tokens: int,
    block_size: int | None,
) -> PlanOptions:
    """Return what a plan is asked for.

    Raises: InvalidRequest or SpecError for a number that is out of range.
    """
    return PlanOptions(
        contexts=None if context is None else tuple(parse_tokens(part, "context") for part in context.split(",")),
        max_model_len=None if max_model_len is None else parse_tokens(max_model_len, "max_model_len"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_batched_tokens,
        block_size=block_size,
    )
