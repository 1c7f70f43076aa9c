"""How long the session of a WebSocket lasts, and how it ends when the gateway stops."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from starlette.websockets import WebSocket

from gateway.dialects.realtime.events import RealtimeError
from gateway.http.sockets import receive_text, stopped
from gateway.settings import GatewaySettings
from gateway.tasks import cancel

_DRAIN_SHARE = 0.9  # of `drain_timeout_s`; the rest is for the last words


class Lifetime:
    """One session's.

    Args:
        is_busy: whether it works for the client, which then may be silent.
    """

    def __init__(self, socket: WebSocket, settings: GatewaySettings, is_busy: Callable[[], bool]) -> None:
        self._socket, self._settings, self._is_busy = socket, settings, is_busy
        self._began = self._heard_at = _now()

    def hear(self) -> None:
        """The client has sent something."""
        self._heard_at = _now()

    async def until_over(self, *tasks: asyncio.Future[Any]) -> RealtimeError | None:
        """Why the session is over; None: one of `tasks` has ended, or the gateway stops."""
        stopping = asyncio.create_task(stopped(self._socket))
        limit_s, idle_s = self._settings.realtime_session_s, self._settings.realtime_idle_s
        try:
            while True:
                now, ends = _now(), self._began + limit_s
                idle_at = (now if self._is_busy() else self._heard_at) + idle_s
                if now >= ends:
                    reason = f"the session has lasted the {limit_s:g} s that one may; connect again"
                    return RealtimeError("session_expired", reason)
                if now >= idle_at:
                    reason = f"nothing came for {idle_s:g} s; connect again when there is something to say"
                    return RealtimeError("session_idle", reason)
                left_s = min(ends, idle_at) - now
                done, _ = await asyncio.wait([*tasks, stopping], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return None
        finally:
            await cancel(stopping)

    async def finish(self, finishing: Coroutine[Any, Any, None], writing: asyncio.Task[None]) -> RealtimeError:
        """Completes what the client waits for, as the gateway stops. Returns the reason of the end.

        Args:
            finishing: returns when all is made.
            writing: sends it.

        Raises:
            WebSocketDisconnect: the client has left; or as `writing`.
        """
        finished, leaving = asyncio.create_task(finishing), asyncio.create_task(self._ignore())
        limit_s = _DRAIN_SHARE * self._settings.drain_timeout_s
        try:
            await asyncio.wait([finished, leaving, writing], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (leaving, writing):
                if task.done():
                    task.result()
        finally:
            await cancel(finished, leaving)
        reason = "the gateway stops; connect again: a new session begins, without this conversation"
        return RealtimeError("gateway_stopping", reason, kind="server_error")

    async def _ignore(self) -> NoReturn:
        """Drops the client's events. Raises WebSocketDisconnect."""
        while True:
            await receive_text(self._socket)


def _now() -> float:
    """Seconds of the event loop's clock, by which it waits."""
    return asyncio.get_running_loop().time()
