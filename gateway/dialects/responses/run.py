"""One response: the events of the answer loop, rendered as OpenAI's items and events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import structlog

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.tools.calls import MAX_CALLS, Rules
from gateway.answers.tools.events import ToolFailure, ToolImage, ToolProgress, ToolResult
from gateway.answers.turn import NextTurn, ToolStart, Turn, TurnEnd
from gateway.answers.turns import Turns
from gateway.dialects.responses.dialog import ResponseDialog
from gateway.dialects.responses.output import HostedOutput, OutputItem, ResponseEvent
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.spec import ResponseSpec, Status, usage_of
from gateway.dialects.responses.turn_output import TurnOutput
from gateway.errors import ApiError, gateway_fault
from gateway.pipeline.events import PromptRead

log = structlog.get_logger()


class ResponseRun:
    """Makes one response.

    Args:
        gateway: the gateway.
        spec: what it is to be.
        keep: called when it has ended, before the client is events so; may raise ApiError.

    Attributes:
        status: how far it is.
        error: what it failed with, if it has.
    """

    def __init__(self, gateway: Gateway, spec: ResponseSpec, keep: Callable[["ResponseRun"], Awaitable[None]]) -> None:
        self._gateway, self.spec, self._keep = gateway, spec, keep
        self.status: Status = "queued" if spec.request.background else "in_progress"
        self._outputs: list[OutputItem] = []
        self._turn_outputs: list[TurnOutput] = []
        self._meter = Meter(spec.request_id, gateway.settings.request_timeout_s, spec.log, spec.arrived)
        request = spec.request
        rules = Rules(request.max_tool_calls or MAX_CALLS, bool(request.stream), spec.owner, spec.hold)
        tools = {name: tool for name, (tool, _) in spec.tools.hosted.items()}
        self._turns = Turns(gateway, ResponseDialog(gateway, spec, self._outputs), tools, rules, self._meter)
        self.error: ApiError | None = None
        self._sequence, self._is_told = 0, False

    @property
    def output(self) -> list[Item]:
        """Its items, as they are now."""
        return [output.item for output in self._outputs]

    def public(self) -> dict[str, Any]:
        """Its object, as it is now."""
        return self.spec.public(self.status, self.output, [turn.answer for turn in self._turn_outputs], self.error)

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """What happens, as it does. Closing the generator ends the work in every stage.

        Raises:
            ApiError: before the first event. Later that is an event, response.failed.
        """
        try:
            if self.spec.request.background:
                for event in self._created():
                    yield self._numbered(event)
            async with aclosing(self._made()) as events:
                async for event in events:
                    yield self._numbered(event)
            await self._end()
        except ApiError as error:
            self.spec.log.update(error.log)
            if not self._is_told:
                raise
            self.error = error
        except Exception:
            log.exception("response failed", request_id=self.spec.request_id)
            if not self._is_told:
                raise
            self.error = gateway_fault()
        if self.error is not None:
            for event in await self._give_up("failed"):
                yield self._numbered(event)
        yield self._numbered({"type": f"response.{self.status}", "response": self.public()})

    async def count(self) -> int:
        """Tokens of its first prompt, as the thinker reads it; nothing is written. Raises ApiError."""
        return await self._turns.count()

    async def cancelled(self) -> None:
        """It was cancelled, and its events have been closed: what there is of it is kept."""
        await self._give_up("cancelled")

    async def _give_up(self, status: Status) -> list[ResponseEvent]:
        self.status = status
        events = [event for output in self._outputs for event in output.close("incomplete")]
        try:
            await self._keep(self)
        except ApiError as error:  # it has failed already; this says why it cannot be got later
            log.error("a response cannot be kept", request_id=self.spec.request_id, error=error.message)
        return events

    async def _end(self) -> None:
        """Settles the status, counts, and keeps it. Raises ApiError: it cannot be kept."""
        self.status = "incomplete" if self._turn_outputs[-1].is_cut_short else "completed"
        answers = [turn.answer for turn in self._turn_outputs]
        tokens = usage_of(answers)
        details = tokens["output_tokens_details"]
        self._meter.count(tokens["input_tokens"], details["text_tokens"], details["audio_tokens"])
        self._meter.count_speech(answers)
        await self._keep(self)

    def _numbered(self, event: ResponseEvent) -> ResponseEvent:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return event

    def _created(self) -> list[ResponseEvent]:
        """The first events, once."""
        if self._is_told:
            return []
        self._is_told = True
        response = self.public()
        return [{"type": name, "response": response} for name in ("response.created", f"response.{self.status}")]

    async def _made(self) -> AsyncGenerator[ResponseEvent, None]:
        """Events of the thinker's turns and of the tools between them. Raises ApiError."""
        request = self.spec.request
        audio_format = (request.audio and request.audio.format) or ("pcm16" if request.stream else "wav")
        turn = self._next_turn()
        hosted: HostedOutput | None = None
        async with aclosing(self._turns.events()) as events:
            async for event in events:
                self.status = "in_progress"
                match event:
                    case NextTurn(tokens):
                        turn = self._next_turn()
                        rendered = turn.take(PromptRead(tokens, ""))
                    case TurnEnd(ended):
                        closed = partial(_closed, turn, ended, audio_format)
                        rendered = await asyncio.to_thread(closed)
                    case ToolStart(call):
                        hosted = HostedOutput(len(self._outputs), call.name)
                        self._outputs.append(hosted)
                        rendered = hosted.open()
                    case ToolProgress() | ToolImage() | ToolResult() | ToolFailure():
                        assert hosted is not None
                        rendered = hosted.take(event)
                    case _:
                        rendered = turn.take(event)
                for each in (*self._created(), *rendered):
                    yield each

    def _next_turn(self) -> TurnOutput:
        self._turn_outputs.append(turn := TurnOutput(self.spec, self._outputs))
        return turn


def _closed(output: TurnOutput, turn: Turn, audio_format: str) -> list[ResponseEvent]:
    """The last events of a turn. Blocking."""
    return [*output.end(turn), *output.close(audio_format)]
