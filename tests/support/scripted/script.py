"""What a scripted stage does, and what happened to it."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from quartet.v1 import timings_pb2
from services.common.errors import StageError
from services.common.rpc.status import abort

# An address of this process alone: a server that is started again finds its port as free as it left it.
HOST = f"127.{os.getpid() // 65536 % 250 + 1}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
TIMINGS = timings_pb2.Timings(queue_ms=1, prefill_ms=2, first_output_ms=3, decode_ms=4, total_ms=5)


@dataclass
class Script:
    """What a stage does and what happened to it.

    Attributes:
        error: raised after the first `after` outputs; or a status as gRPC itself makes it of a stage that is gone.
        after: outputs before `error` or `hold`.
        hold: wait here until `release` is set.
        requests: the start messages received.
        media: bytes that came in MediaChunks.
        typed: text that came after the start.
        ended: "done" or "cancelled", one for each call.
        running: calls that have not ended.
        queued: requests that it says to have waiting.
        too_long: the answer ends at its most tokens.
        stop: the stop string that a thinker says ended the answer.
        ids_reusable: what a thinker says of the answer's token ids.
        thought: pieces of what a thinker thinks before it answers.
        pieces: the tokens of its answer; none: "Hello, world".
        frames: of sound that a code2wav makes, of 80 ms each; none: its usual three.
        lengths: the frames for a request of that id, in place of `frames`.
        takes_s: how long a call takes, beside.
        calls: (name, arguments) of functions that the next answers call, one each, or a list of them that an answer
            calls together; None is text, as are the answers after them.
        replies: what a thinker makes of a request, whatever else it is told: (name, arguments) of a function that it
            calls, or pieces of text.
        missing: a directory that no adapter can be loaded from.
    """

    error: StageError | tuple[grpc.StatusCode, str] | None = None
    after: int = 0
    hold: bool = False
    logprobs: bool = False
    tool_call: bool = False
    calls: list[tuple[str, str] | list[tuple[str, str]] | None] = field(default_factory=list)
    too_long: bool = False
    stop: str = ""
    ids_reusable: bool = True
    thought: Sequence[str] = ()
    pieces: Sequence[str] = ()
    replies: Callable[[Any], tuple[str, str] | list[str]] | None = None
    missing: str = ""
    requests: list[Any] = field(default_factory=list)
    media: bytearray = field(default_factory=bytearray)
    typed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    frames: int | None = None
    lengths: Callable[[str], Awaitable[int]] | None = None
    takes_s: Callable[[], float] = lambda: 0.0
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def go_on(self) -> None:
        """No call stands still any more."""
        self.hold = False
        self.release.set()

    async def reset(self) -> None:
        """As new, once its calls have ended: those that stand still go on."""
        self.go_on()
        async with asyncio.timeout(60):
            while self.running:
                await asyncio.sleep(0.005)
        vars(self).update(vars(Script()))

    async def play(self, request: Any, outputs: list[Any], context: grpc.aio.ServicerContext) -> AsyncGenerator[Any]:
        """The outputs, as far as the script goes."""
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(self.takes_s())
            for i, output in enumerate([*outputs, None]):
                if i == self.after and self.hold:
                    self.holding.set()
                    await self.release.wait()
                if i == self.after and isinstance(self.error, tuple):
                    await context.abort(*self.error)
                if i == self.after and isinstance(self.error, StageError):
                    await abort(context, self.error)
                if output is not None:
                    yield output
            self.ended.append("done")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            self.running -= 1
