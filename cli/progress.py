"""The progress bar of the commands that make something."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float | None], None]  # (what is being done, share of all that is done: 0 to 1, None: not known)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Report]:
    """A bar with the time gone by, on stderr and on a terminal only, that goes when the block ends.

    Args:
        what: is being done at first; how much of it is done, nobody knows until the first report.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def report(doing: str, share: float | None) -> None:
            progress.update(task, description=doing, total=None if share is None else 1.0, completed=share or 0.0)

        yield report
