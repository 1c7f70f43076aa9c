"""Media are read in processes that have limits and end with their client: see `services.common.media.decoders`."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.media.long_sounds import SoundFiles
from gateway.settings import GatewaySettings
from services.common.media.decoders import Decoders

Result = TypeVar("Result")
_PROCESSES = 8
_WARM_S = 5.0

_shared = functools.cache(Decoders)  # which this process keeps to its end


class Decoding:
    """Threads, each with a process that decodes.

    Attributes:
        sounds: for files that are read in rounds.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._decoders = _shared(settings.decoding_memory_bytes, settings.request_timeout_s)
        self._threads = ThreadPoolExecutor(_PROCESSES, "decoding")
        self.sounds = SoundFiles(self._decoders)

    def start_later(self) -> None:
        """Makes the first request with media as fast as others."""
        asyncio.get_running_loop().call_later(_WARM_S, self._decoders.server.start)

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """As of `Decoders.run`."""
        return await self._decoders.run(self._threads, call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
