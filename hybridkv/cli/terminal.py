"""What the terminal sees: error lines, progress bars, exit codes of a command."""

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

from hybridkv.errors import CheckpointError, InvalidRequest, SpecError

Report = Callable[[str, float], None]


def print_error(message: str) -> None:
    """Print one line on stderr, whatever the message holds."""
    line = "; ".join(part.strip() for part in message.splitlines() if part.strip())
    print(f"hybridkv: {line}", file=sys.stderr)


def guarded(action: Callable[[], int]) -> int:
    """Return the action's exit code, or the code of its failure after printing one line about it.

    A bug of this library keeps its traceback.
    """
    try:
        code = action()
        sys.stdout.flush()
    except (SpecError, InvalidRequest, CheckpointError) as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit, which must find something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, OSError) as error:
        print_error(f"{type(error).__name__}: {error}")
        return 1
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; torch may not be there to ask
            raise
        print_error(f"the device is out of memory; use a smaller --memory ({error})")
        return 1
    return code


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Yield a function that shows a description with a fraction done; it does nothing unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _description, _fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
    task = bar.add_task("Starting", total=1.0)

    def report(description: str, fraction: float) -> None:
        bar.update(task, description=description, completed=fraction)
        bar.start()  # not before the first report: until then other bars, such as a download's, may show

    try:
        yield report
    finally:
        bar.stop()


@contextmanager
def hidden_stderr() -> Iterator[None]:
    """Keep what libraries print on stderr away, unless that is a terminal: some of their bars have no switch."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the warnings of other libraries, as well as their progress bars, out of the user's sight."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        import huggingface_hub
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        huggingface_hub.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            huggingface_hub.utils.disable_progress_bars()
        yield
