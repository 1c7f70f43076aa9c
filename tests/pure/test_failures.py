"""What a failed process wrote or raised, as a sentence."""

import json
import re

import pytest

from services.common import failures

OPAQUE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("there is no talker;\n name another"), "there is no talker; name another"),
        (KeyError("ours"), "KeyError: 'ours'"),
        (TimeoutError(), "TimeoutError"),
        (MemoryError(), "the memory is full: .*"),
        (OSError(28, "No space left on device", "/data/x"), r"the disk is full \(/data/x\): make room there, .*"),
        (PermissionError(13, "Permission denied", "/data/x"), "no permission for /data/x: .*"),
        (ImportError("libfoo.so.2: cannot open shared object file"), "the library libfoo.so.2 is not on .*"),
        (RuntimeError("Failed to bind to address 127.0.0.1:1"), "port 1 is taken: .*"),
        (ValueError("1 validation error for C\n  Value error, no such thing [type=value_error, x]"), "no such thing"),
    ],
)
def test_an_error_is_a_sentence(error: BaseException, said: str) -> None:
    assert re.fullmatch(said, failures.sentence(error))


def test_a_cause_goes_before_its_consequences() -> None:
    missing = "Failed to import from vllm._C_AVX2: ImportError('libnuma.so.1: cannot open shared object file')"
    follows = "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'"
    assert "libnuma.so.1" in str(failures.first_cause([missing, follows, OPAQUE]))
    assert failures.first_cause([OPAQUE, "ValueError: a, b", "KeyError: c"]) == "ValueError: a, b"
    assert failures.first_cause([OPAQUE]) is None


def test_a_signal_that_ended_the_engine_is_named() -> None:
    killed = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -4}"
    assert "SIGILL: the CPU lacks an instruction" in str(failures.ended_child(killed))
    assert str(failures.ended_child(OPAQUE)).startswith("the engine's process was killed: most likely")
    assert failures.ended_child("ValueError: other") is None


def test_a_log_says_why_its_process_ended() -> None:
    own = json.dumps({"event": failures.EVENT, "error": "the cause", "level": "critical"})
    noise = 'UserWarning: resource_tracker: 1 leaked\n{"event": "stopped", "level": "info"}'
    assert failures.own_words(f"{own}\n{noise}") == "the cause"
    assert failures.own_words(noise) is None
    assert failures.last_error('{"event": "stopped", "level": "info"}\n') is None
    trace = "Traceback (most recent call last):\n  File x\nImportError: libfoo.so.2: cannot open shared object file\n"
    assert str(failures.last_error(trace)).startswith("the library libfoo.so.2 is not on this machine")
    assert failures.last_error("invalid settings\nport: no\ndtype: no\n") == "port: no; dtype: no"
    line = json.dumps({"event": "ended", "level": "critical", "exception": "Traceback\nKeyError: 'x'"})
    assert failures.last_error(line) == "KeyError: 'x'"
