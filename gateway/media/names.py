"""Looks up the names of media's hosts in threads of their own. A name server that is silent holds up a thread; the
threads of the event loop look up the stages."""

import asyncio
import socket
from concurrent.futures import Future, ThreadPoolExecutor

from services.common.media import MediaError

LOOK_UP_S = 2.0
MAX_OF_REQUEST = 2  # at a time
_THREADS, _MAX_WAITING = 32, 32


class NameLookUps:
    """Look-ups, bounded in time and number. One that nobody answers keeps its thread until the system gives it up."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "media-names")
        self._open = set[Future[list[str]]]()

    async def addresses(self, host: str, port: int) -> list[str]:
        """Raises MediaError: the name is unknown, or nobody answers in time."""
        self._open = {each for each in self._open if not each.done()}
        if len(self._open) >= _THREADS + _MAX_WAITING:
            raise MediaError(f"too many names are looked up at the moment for {host!r} to be; try again later")
        self._open.add(work := self._threads.submit(_addresses, host, port))
        try:
            async with asyncio.timeout(LOOK_UP_S):
                return await asyncio.wrap_future(work)  # a timeout takes what has not begun out of the queue
        except TimeoutError:
            raise MediaError(f"nobody answered within {LOOK_UP_S:g} s where the host {host!r} is") from None
        except (OSError, UnicodeError):
            raise MediaError(f"the host {host!r} cannot be resolved") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
