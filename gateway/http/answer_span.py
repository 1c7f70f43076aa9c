"""The gateway's span of an answer."""

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from services.common.telemetry.spans import Span


def with_firsts(span: Span, fields: Mapping[str, Any]) -> Span:
    """Adds phases until the first text and audio, whose times the log line's `fields` have."""
    firsts = [("until first text", fields.get("ttft_ms")), ("until first audio", fields.get("ttfa_ms"))]
    marks = sorted(((name, span.start + ms / 1000) for name, ms in firsts if ms is not None), key=itemgetter(1))
    last = [] if span.end is None else [("until its end", max(span.end, span.start, *(at for _, at in marks)))]
    ends = [*marks, *last]
    starts = [span.start, *(at for _, at in ends)]
    phases = [(name, start, at) for start, (name, at) in zip(starts, ends, strict=False)]
    return replace(span, phases=phases, first_output=marks[0][1] if marks else None)
