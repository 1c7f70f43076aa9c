"""Processes that decode: what they may take, who ends them, and that the next request has its answer."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from services.common.errors import InternalError, RequestCancelled
from services.common.media import TOO_LARGE, MediaError
from services.common.media.decoders import DecoderProcess, Decoders
from tests.support.samples import odd_images
from tests.support.samples.media import png, wav
from tests.support.scripted.preprocessing import SOON_S, gone, processes

MEMORY_BYTES = 64 << 20
RATE_HZ = 16_000
SMALL, LONG = png(40, 30), wav(60.0)  # more than what a connection holds
SIDE = 6000
LARGE = odd_images.png(np.zeros((SIDE, SIDE // 8), np.uint8), (SIDE, SIDE), 1, 0)  # 108 MB when decoded


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(MEMORY_BYTES, 30.0)
    with pytest.MonkeyPatch.context() as patch:  # as vLLM does, for its own processes
        patch.setenv("LD_PRELOAD", str(next(Path(torch.__file__).parent.glob("lib/libgomp*"))))
        yield decoders
    decoders.close()


@pytest.fixture(autouse=True)
def next_request(decoders: Decoders) -> Iterator[None]:
    """Has its answer."""
    yield
    with decoders.lend(lambda: False) as read:
        assert list(read("image_size", SMALL, 10_000)) == [[40, 30]]
    until = time.monotonic() + SOON_S
    while len(processes(decoders)) != 1:  # kept for the next one, and no others
        assert time.monotonic() < until
        time.sleep(0.005)


def begin(decoders: Decoders, read: DecoderProcess) -> tuple[Iterator[np.ndarray], psutil.Process]:
    """(what is left of a file's sound, the process that decodes it)."""
    pieces = read("sound", LONG, RATE_HZ, 100.0)
    assert len(next(pieces)) >= RATE_HZ
    (process,) = processes(decoders)
    return pieces, process


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_crash_is_the_files(decoders: Decoders, by: signal.Signals) -> None:
    with decoders.lend(lambda: False) as read:
        pieces, process = begin(decoders, read)
        with decoders.lend(lambda: False) as other:
            next(other("sound", LONG, RATE_HZ, 100.0))
            process.send_signal(by)
            with pytest.raises(MediaError, match="its decoder crashed"):
                list(pieces)
    assert gone(process)


def test_one_that_died_idle_is_replaced(decoders: Decoders) -> None:
    with decoders.lend(lambda: False) as read:
        list(read("image_size", SMALL, 10_000))
    (process,) = processes(decoders)
    process.kill()
    while processes(decoders):
        time.sleep(0.001)


def test_what_needs_more_memory_is_refused(decoders: Decoders) -> None:
    """Here, no memory is taken for it."""
    most, done, own = [0], threading.Event(), psutil.Process()
    before = own.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            most.append(own.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with decoders.lend(lambda: False) as read:
        with pytest.raises(MediaError, match=TOO_LARGE):
            list(read("image", LARGE, SIDE * SIDE))
        assert list(read("image_size", SMALL, 10_000)) == [[40, 30]]  # by the same process
    done.set()
    watcher.join()
    assert max(most) < before + MEMORY_BYTES // 4


def test_what_takes_too_long_is_killed(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoders.lend(lambda: False) as read:
        monkeypatch.setattr(read, "_limit_s", 0.3)
        pieces, process = begin(decoders, read)
        process.suspend()
        with pytest.raises(MediaError, match=r"takes longer than 0\.3 s"):
            list(pieces)
    assert gone(process)


def test_a_client_that_leaves_ends_its_process(decoders: Decoders) -> None:
    left = threading.Event()
    with decoders.lend(left.is_set) as read:
        pieces, process = begin(decoders, read)
        process.suspend()
        threading.Timer(0.1, left.set).start()
        with pytest.raises(RequestCancelled):
            list(pieces)
    assert gone(process)


def test_a_caller_that_has_enough_ends_its_process(decoders: Decoders) -> None:
    with decoders.lend(lambda: False) as read:
        _, process = begin(decoders, read)
    assert gone(process)


def test_the_server_is_started_again(decoders: Decoders) -> None:
    with decoders.lend(lambda: False) as read:
        pieces, process = begin(decoders, read)
        process.suspend()
        psutil.Process(decoders.server.pid).kill()
        with pytest.raises(InternalError):
            list(pieces)
    assert gone(process)


def test_one_forgets_a_request(decoders: Decoders) -> None:
    """Files have numbers; those of the last request are not read for the next one."""
    for file, size in ((SMALL, [40, 30]), (png(20, 10), [20, 10])):
        with decoders.lend(lambda: False) as read:
            assert list(read("image_size", file, 10_000)) == [size]


def test_processes_are_small_and_import_no_torch(decoders: Decoders) -> None:
    with decoders.lend(lambda: False) as read:
        _, process = begin(decoders, read)
        assert max(each.memory_info().rss for each in (process, psutil.Process(decoders.server.pid))) < 120 << 20
        assert process.nice() > 0  # files come after tokens
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
        assert not any("torch" in each.path for each in process.memory_maps())


PARENT = """
from services.common.media.decoders import Decoders
from tests.support.samples.media import wav
decoders = Decoders(1 << 30, 30.0)
with decoders.lend(lambda: False) as read:
    pieces = read("sound", wav(60.0), 16_000, 100.0)
    next(pieces)
    print(decoders.server.pid, flush=True)
    input()
"""


def test_they_end_with_their_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        (decoder,) = server.children()
        decoder.suspend()
        parent.kill()
        assert gone(server)
        assert gone(decoder)
