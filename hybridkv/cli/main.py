"""The `hybridkv` command: its subcommands, exit codes, error lines.

0    done
1    failed, or an output differs from what it was checked against
2    bad usage or input; one line on stderr says what
130  interrupted
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import hybridkv
from hybridkv.cli.plan import compare, fit, plan
from hybridkv.cli.run import run
from hybridkv.cli.spec import spec
from hybridkv.cli.terminal import print_error
from hybridkv.cli.tiny import tiny

# typer has moved its copy of click between versions; the base of its own exception is the one name that stays.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="hybridkv",
    help="KV-cache manager for hybrid language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, plan, fit, compare, spec, tiny):
    app.command()(command)


def _print_version(value: bool) -> None:
    if value:
        print(f"hybridkv {hybridkv.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache manager for hybrid language models."""
    if context.invoked_subcommand is None and not version:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="hybridkv", standalone_mode=False)
    except _UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        print_error(f"{message} (see hybridkv --help)")
        return 2
    except typer.Abort:
        print_error("interrupted")
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
