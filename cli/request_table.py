"""Where a request's time went, as a table with bars."""

from typing import Any

from rich.markup import escape
from rich.table import Table

_WIDTH = 32  # characters of the longest bar
_FIRST_OUTPUT = "◆"
_DONE, _STILL = "█", "░"


def table(told: dict[str, Any]) -> Table:
    """The table of what the gateway's /v1/quartet/trace told: a row for each stage in the order of their starts, and
    below it its phases. Times are milliseconds, starts those since the request's own."""
    spans = told["spans"]
    start_us = spans[0]["start_us"]
    end_us = max([start_us + 1, *(at for span in spans for at in _times(span))])
    made = Table(title=f"request {escape(told['request_id'])}", title_justify="left")
    for heading in ("stage", "replica"):
        made.add_column(heading, no_wrap=True)
    for heading in ("start ms", "took ms", "first output ms"):
        made.add_column(heading, justify="right")
    made.add_column("outcome")
    made.add_column(f"{_milliseconds(end_us - start_us)} ms", no_wrap=True)
    for span in spans:
        last_us = span["end_us"]
        bar = _bar(span["start_us"], last_us or end_us, start_us, end_us, _DONE if last_us else _STILL)
        if (first_us := span["first_output_us"]) is not None:
            at = min(len(bar.ljust(_WIDTH)) - 1, int((first_us - start_us) / (end_us - start_us) * _WIDTH))
            bar = bar.ljust(_WIDTH)[:at] + _FIRST_OUTPUT + bar.ljust(_WIDTH)[at + 1 :]
        part = span["request_id"].removeprefix(told["request_id"])
        made.add_row(
            f"[bold]{escape(span['stage'] + part)}[/bold]",
            span["address"],
            _milliseconds(span["start_us"] - start_us),
            "-" if last_us is None else _milliseconds(last_us - span["start_us"]),
            "-" if first_us is None else _milliseconds(first_us - span["start_us"]),
            span["outcome"] or "still served",
            bar.rstrip(),
        )
        for phase in span["phases"]:
            made.add_row(
                f"  {phase['name']}",
                "",
                _milliseconds(phase["start_us"] - start_us),
                _milliseconds(phase["end_us"] - phase["start_us"]),
                "",
                "",
                f"[dim]{_bar(phase['start_us'], phase['end_us'], start_us, end_us, _DONE)}[/dim]",
            )
    made.caption, made.caption_justify = f"{_FIRST_OUTPUT} first output", "left"
    return made


def _times(span: dict[str, Any]) -> list[float]:
    ends = [span["start_us"], span["end_us"], *(phase["end_us"] for phase in span["phases"])]
    return [at for at in ends if at is not None]


def _bar(first_us: float, last_us: float, start_us: float, end_us: float, block: str) -> str:
    """From `first_us` to `last_us` on a line from `start_us` to `end_us`; never nothing."""
    scale = _WIDTH / (end_us - start_us)
    left = min(int((first_us - start_us) * scale), _WIDTH - 1)
    right = max(left + 1, round((last_us - start_us) * scale))
    return " " * left + block * (right - left)


def _milliseconds(us: float) -> str:
    return f"{us / 1000:.1f}"
