"""Messages of commands on stderr: progress and errors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

Report = Callable[[str, float | None], None]  # (label, share of the work done: 0 to 1, None: unknown)
console = Console(stderr=True)


class CommandError(Exception):
    """A command cannot do its work; the message says why, `details` is shown before it."""

    exit_status = 1
    details = ""


class Commands(TyperGroup):
    """Prints the errors of all commands."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommandError as error:
            if error.details:
                console.print(error.details, highlight=False, markup=False, soft_wrap=True)
            console.print("[bold red]error:[/bold red]", escape(str(error)), highlight=False, soft_wrap=True)
            raise typer.Exit(error.exit_status) from None


@contextlib.contextmanager
def bar(what: str) -> Iterator[Report]:
    """Shows a progress bar, on a terminal only; `what` is its first label."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def report(doing: str, share: float | None) -> None:
            progress.update(task, description=doing, total=None if share is None else 1.0, completed=share or 0.0)

        yield report
