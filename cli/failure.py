"""How a command says that it failed."""

from typing import NoReturn

import typer
from rich.console import Console

_errors = Console(stderr=True)


def fail(error: Exception, status: int = 1) -> NoReturn:
    """Prints the error and ends the command with `status`."""
    _errors.print("[bold red]error:[/bold red]", end=" ")
    _errors.print(str(error), highlight=False, markup=False, soft_wrap=True)  # brackets in it are no markup
    raise typer.Exit(status)
