"""`hybridkv tiny`: a small random checkpoint of any family, to try the runner on."""

from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.run import lacks_run_extra
from hybridkv.cli.terminal import guarded, quiet_libraries
from hybridkv.errors import InvalidRequest


def tiny(
    family: Annotated[
        str | None, typer.Argument(metavar="FAMILY", help="A family, see --list.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The folder to make; it may exist if it is empty.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Another seed gives other weights.")] = 0,
    list_families: Annotated[bool, typer.Option("--list", help="List the families.")] = False,
) -> None:
    """Write a small random checkpoint of a family, with a tokenizer of a token a byte, to try the runner on."""

    def action() -> int:
        if not list_families and (family is None or out is None):
            missing = "FAMILY" if family is None else "OUT"
            raise InvalidRequest(f"Missing argument '{missing}'; hybridkv tiny --list prints the families")
        if lacks_run_extra("tiny"):
            return 2
        with quiet_libraries():
            from hybridkv.runner.tiny import FAMILIES, make_tiny

            if list_families or family is None or out is None:
                print("\n".join(FAMILIES))
            else:
                print(make_tiny(family, out, seed=seed, tokenizer=True))
        return 0

    raise typer.Exit(guarded(action))
