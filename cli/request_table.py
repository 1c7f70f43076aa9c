"""A table of where a request's time went."""

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

_LEAST_WIDTH = 10  # characters of the longest bar
_BESIDE = 60  # characters of a line that are no bar
_DONE, _STILL, _MOMENT = "█", "░", "◆"


def trace_table(trace: dict[str, Any], width: int) -> Table:
    """Shows an answer of /v1/quartet/trace: a row for each stage, then its phases. Times are milliseconds.

    Args:
        width: characters of a line.
    """
    spans = trace["spans"]
    line = _Line(spans, max(_LEAST_WIDTH, width - _BESIDE))
    table = Table(title=f"request {escape(trace['request_id'])}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    for heading in ("start ms", "took ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    table.add_column(f"0 to {_milliseconds(line.end_us - line.start_us)} ms", no_wrap=True)
    for span in spans:
        part = span["request_id"].removeprefix(trace["request_id"])
        name, last_us = f"[bold]{escape(span['stage'] + part)}[/bold]", span["end_us"]
        bar = line.bar(span["start_us"], last_us or line.end_us, _DONE if last_us else _STILL)
        table.add_row(name, *line.times(span["start_us"], last_us), span["outcome"] or "not yet", bar)
        for phase in span["phases"]:
            times = phase["start_us"], phase["end_us"]
            table.add_row(f"  {phase['name']}", *line.times(*times), "", f"[dim]{line.bar(*times, _DONE)}[/dim]")
        if (first_us := span["first_output_us"]) is not None:
            table.add_row("  first output", *line.times(first_us, None), "", line.bar(first_us, first_us, _MOMENT))
    replicas = dict.fromkeys(f"{span['stage']} {span['address']}" for span in spans if span["address"])
    table.caption, table.caption_justify = ", ".join(replicas), "left"
    return table


class _Line:
    """Draws times of `spans`, in microseconds of Unix time, on a line of `width` characters."""

    def __init__(self, spans: list[dict[str, Any]], width: int) -> None:
        times = [span["end_us"] or span["start_us"] for span in spans]
        times += [phase["end_us"] for span in spans for phase in span["phases"]]
        self.start_us = min(span["start_us"] for span in spans)
        self.end_us = max(self.start_us + 1, *times)
        self._width = width

    def times(self, first_us: float, last_us: float | None) -> tuple[str, str]:
        """Returns (start since the line's, length)."""
        return _milliseconds(first_us - self.start_us), "" if last_us is None else _milliseconds(last_us - first_us)

    def bar(self, first_us: float, last_us: float, block: str) -> str:
        """Draws a bar of at least one character."""
        scale = self._width / (self.end_us - self.start_us)
        left = min(int((first_us - self.start_us) * scale), self._width - 1)
        right = max(left + 1, round((last_us - self.start_us) * scale))
        return " " * left + block * (right - left)


def _milliseconds(us: float) -> str:
    return f"{us / 1000:.1f}"
