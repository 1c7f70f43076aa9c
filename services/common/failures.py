"""What a failed start says to people: one sentence with its cause and what to do, for causes known by libraries' texts;
else the last error.
"""

import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any

EVENT = "cannot start"  # of the last line that a stage logs
TRACEBACKS = "QUARTET_TRACEBACKS"  # environment variable: with 1, a failed start's traceback is logged at any level

_MOST_CHARACTERS = 600
# A pattern of what a library says -> the cause, and what to do. {what} is the pattern's group 1, {where} the same in
# parentheses if it is there.
_KNOWN = {
    r"libnuma\.so\.1": "the library libnuma.so.1 is not on this machine: "
    "install it (apt install libnuma1, dnf install numactl-libs, apk add numactl)",
    r"([\w.+-]+\.so[\w.]*): cannot open shared object file": "the library {what} is not on this machine: "
    "install the package of your system that has it",
    r"_OpNamespace' '_C\w*' object has no attribute": "vLLM's kernels are not loaded: "
    "`quartet doctor` says what this machine lacks for them",
    r"driver on your system is too old": "NVIDIA's driver is too old: install a newer one; `quartet doctor` says",
    r"CUDA out of memory": "the GPU's memory is full: end what else runs there, or take a smaller model",
    r"[Cc]an(?:no|')t allocate memory|MemoryError|[Oo]ut of memory|bad_alloc|create a primitive": "the memory is full: "
    "end what else runs, or take a larger machine or a smaller model",
    r"(?:No space left on device|[Nn]ot enough free disk space)(?:.*?'([^']+)')?": "the disk is full{where}: "
    "make room there, or name another place: HF_HOME for what is fetched, TMPDIR for temporary files",
    r"(?:[Pp]ermission denied|PermissionError).*?'([^']+)'": "no permission for {what}: "
    "let the user that runs this read it (chmod, chown), or name another",
    r"SafetensorError|corrupt or not all there|HeaderTooLarge|MetadataIncompleteBuffer": "a file of the checkpoint is "
    "corrupt or not all there: fetch it again",
    r"No available memory for the cache blocks|Cannot auto-fit max_model_len": "there is no room for the KV cache: "
    "raise --kv-cache-bytes, or on a GPU --gpu-memory-utilization",
    r"(KV cache is needed.*?larger than the available KV cache memory[^.]*)": "{what}: "
    "raise --kv-cache-bytes, or lower --max-context-tokens",
    r"[Ff]ailed to bind to address \S*:(\d+)": "port {what} is taken: name a free one by --port",
    r"[Ff]ailed to bind|[Aa]ddress already in use": "the port is taken: name a free one by --port",
    r"GatedRepo|Access to model .* is restricted": "the model is gated: "
    "accept its terms on its page at the hub, then log in by HF_TOKEN",
}
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


def _known(text: str) -> str | None:
    for pattern, message in _KNOWN.items():
        if found := re.search(pattern, text, re.DOTALL):
            what = _one_line(found[1] or "") if found.re.groups else ""
            return message.format(what=what, where=what and f" ({what})")
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
