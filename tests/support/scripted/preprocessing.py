"""A thinker's preprocessor, without an engine behind it."""

import atexit
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import psutil

from services.common.media.decoders import Decoders
from services.thinker.config import ThinkerSettings
from services.thinker.family import ThinkerCheckpoint
from services.thinker.preprocess import Preprocessor

SOON_S = 1.0


class _Renderer:
    """Gives back what vLLM would get."""

    async def process_for_engine_async(self, prompt: Any, _: float) -> Any:
        return prompt


@functools.cache
def decoders() -> Decoders:
    """Those of all tests of this process."""
    settings = ThinkerSettings(model="unused")
    shared = Decoders(settings.decoding_memory_bytes, settings.max_decoding_s)
    atexit.register(shared.close)
    return shared


@contextmanager
def preprocessor_of(checkpoint: ThinkerCheckpoint, max_context_tokens: int) -> Iterator[Preprocessor]:
    """It has one thread of each kind."""
    engine: Any = SimpleNamespace(checkpoint=checkpoint, max_context_tokens=max_context_tokens, renderer=_Renderer())
    preprocessor = Preprocessor(ThinkerSettings(model="unused", preprocessing_threads=1), engine, decoders())
    try:
        yield preprocessor
    finally:
        preprocessor.close()


def processes(decoders: Decoders) -> list[psutil.Process]:
    return psutil.Process(decoders.server.pid).children()


def gone(process: psutil.Process) -> bool:
    """Soon."""
    until = time.monotonic() + SOON_S
    with suppress(psutil.NoSuchProcess):  # it may go while it is looked at
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.005)
    return time.monotonic() < until
