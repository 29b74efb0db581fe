"""`hybridkv spec`: what every layer of a model keeps."""

from typing import Annotated

import typer

from hybridkv.cli import values
from hybridkv.cli.models import find_model
from hybridkv.cli.tables import print_json, print_spec
from hybridkv.cli.terminal import guarded
from hybridkv.errors import InvalidRequest
from hybridkv.report import spec_report
from hybridkv.specs import known_models


def spec(  # noqa: PLR0913  (one argument an option is how typer works)
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=values.MODEL_HELP, show_default=False)] = None,
    kv_dtype: values.KVDtype = None,
    state_dtype: values.StateDtype = None,
    tp: values.TP = 1,
    draft_layers: values.DraftLayers = 0,
    max_source_tokens: values.MaxSourceTokens = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the known models.")] = False,
    json: values.JsonFlag = False,
) -> None:
    """Say what every layer of a model keeps, with the totals."""

    def action() -> int:
        if list_models:
            names = known_models()
            if json:
                print_json({"models": [*names]})
            else:
                print("\n".join(names))
            return 0
        if model is None:
            raise InvalidRequest("Missing argument 'MODEL'; hybridkv spec --list prints the known models")
        stored = values.cache_options(kv_dtype, state_dtype, tp, draft_layers, max_source_tokens)
        report = spec_report(find_model(model, stored))
        if json:
            print_json(report.to_dict())
        else:
            print_spec(report)
        return 0

    raise typer.Exit(guarded(action))
