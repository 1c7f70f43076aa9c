"""What a failed start says to people: one sentence with its cause and what to do, for causes known by libraries' texts;
else the last error.
"""

import json
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

EVENT = "cannot start"  # of the last line that a stage logs
TRACEBACKS = "QUARTET_TRACEBACKS"  # environment variable: with 1, a failed start's traceback is logged at any level

_MOST_CHARACTERS = 600
_CONSEQUENCES = re.compile(r"See root cause above|See stack trace for root cause|EngineDeadError")
_ENDED_CHILD = re.compile(r"Failed core proc\(s\): .*?: (-\d+)")
_SIGNALS = {
    signal.SIGKILL: "most likely the memory was full (dmesg says): take a larger machine or a smaller model",
    signal.SIGILL: "the CPU lacks an instruction that the engine needs: take one with AVX2 or AVX-512",
    signal.SIGBUS: "most likely /dev/shm or the disk was full: enlarge it (docker: --shm-size)",
}
_VALIDATION = re.compile(r"Value error, (.*?)(?: \[type=|$)")  # pydantic's, around what a library says


def sentence(error: BaseException) -> str:
    """The cause of `error`, and what to do if that is known."""
    text = str(error)
    if known := _known(f"{type(error).__name__}: {text}"):
        return known
    if isinstance(error, (ValueError, OSError)) and text:  # raised for people
        return _one_line(text)
    return _one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def first_cause(texts: Iterable[str]) -> str | None:
    """Of a start's errors ("Type: message"), in order, the first known one that is no consequence, else the first."""
    causes = [text for text in texts if not _CONSEQUENCES.search(text)]
    known = next(filter(None, map(_known, causes)), None)
    return known or (_one_line(causes[0]) if causes else None)


def ended_child(text: str) -> str | None:
    """Which signal ended the engine's process, as vLLM's `text` says; None: it is about something else."""
    found = _ENDED_CHILD.search(text)
    if found is None:
        return f"the engine's process was killed: {_SIGNALS[signal.SIGKILL]}" if _CONSEQUENCES.search(text) else None
    number = signal.Signals(-int(found[1]))
    remedy = _SIGNALS.get(number, f"its log may say more; {TRACEBACKS}=1 has it say all")
    return f"the engine's process was ended by {number.name}: {remedy}"


def own_words(log: str) -> str | None:
    """The error of a stage's last `EVENT` in its `log`; None: it logged none."""
    entries = (entry for line in reversed(log.splitlines()) if (entry := _entry(line)))
    return next((str(entry.get("error")) for entry in entries if entry.get("event") == EVENT), None)


def last_error(log: str) -> str | None:
    """The last error of a process that ended without `EVENT`: a traceback's last line, a line that is no JSON, or an
    error's."""
    lines = [line for line in log.splitlines() if line.strip()]
    while lines:
        line = lines.pop()
        entry = _entry(line)
        if entry is None:
            if "invalid settings" in lines:
                return _one_line("; ".join([*lines[lines.index("invalid settings") + 1 :], line]))
            return _known(line) or _one_line(line)
        if entry.get("level") in ("critical", "error"):
            said = str(entry.get("exception") or entry.get("event")).strip().splitlines()[-1]
            return _known(said) or _one_line(said)
    return None


def shows_tracebacks() -> bool:
    return os.environ.get(TRACEBACKS) == "1"


@cache
def _causes() -> Sequence[Mapping[str, str]]:
    import yaml  # by a start that fails: the others need not wait for it

    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def _known(text: str) -> str | None:
    for known in _causes():
        if found := re.search(known["pattern"], text, re.DOTALL):
            what = _one_line(found[1] or "") if found.re.groups else ""
            return known["cause"].format(what=what, where=what and f" ({what})")
    return None


def _one_line(text: str) -> str:
    if found := _VALIDATION.search(" ".join(text.split())):
        text = found[1]
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def _entry(line: str) -> Mapping[str, Any] | None:
    """The line as JSON; None if it is none."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
