"""One response: the answer loop's events as OpenAI's items and events."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import structlog

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.tools.calls import MAX_CALLS, Rules
from gateway.answers.tools.events import ToolEvent
from gateway.answers.turn import NextTurn, ToolStart, TurnEnd
from gateway.answers.turns import Turns
from gateway.dialects.responses.dialog import ResponseDialog
from gateway.dialects.responses.output import HostedOutput, OutputItem, ResponseEvent
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.raw_messages import raw_messages
from gateway.dialects.responses.spec import ResponseSpec, Status, usage_of
from gateway.dialects.responses.turn_output import TurnOutput
from gateway.errors import ApiError, gateway_fault
from gateway.pipeline.events import PromptRead

log = structlog.get_logger()


class ResponseRun:
    """Makes one response. `keep` is called when it has ended, before the last event; it may raise ApiError.

    Attributes:
        generates: whether the thinker writes; else its prompt is only checked.
        error: what it failed with, if it has.
    """

    def __init__(self, gateway: Gateway, spec: ResponseSpec, keep: Callable[["ResponseRun"], Awaitable[None]]) -> None:
        self._gateway, self.spec, self._keep = gateway, spec, keep
        self.status: Status = "queued" if spec.request.background else "in_progress"
        self._outputs: list[OutputItem] = []
        self._turn_outputs: list[TurnOutput] = []
        self._meter = Meter(spec.request_id, gateway.settings.request_timeout_s, spec.log, spec.arrived, spec.key)
        request = spec.request
        rules = Rules(request.max_tool_calls or MAX_CALLS, bool(request.stream), spec.key)
        tools = {name: tool for name, (tool, _) in spec.tools.hosted.items()}
        self._turns = Turns(gateway, ResponseDialog(gateway, spec, self._outputs), tools, rules, self._meter)
        self.generates = True
        self.error: ApiError | None = None
        self._sequence, self._is_told = 0, False
        self._raw = dict[str, Any]()  # of its object: the prompts and outputs as token ids

    @property
    def output(self) -> list[Item]:
        """Its items so far."""
        return [output.item for output in self._outputs]

    def public(self) -> dict[str, Any]:
        """Its object."""
        answers = [turn.answer for turn in self._turn_outputs]
        return self.spec.public(self.status, self.output, answers, self.error) | self._raw

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """Runs it. Closing the generator ends the work in every stage.

        Raises:
            ApiError: before the first event. Later it is an event, response.failed.
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
            for event in await self.give_up("failed"):
                yield self._numbered(event)
        yield self._numbered({"type": f"response.{self.status}", "response": self.public()})

    async def count(self) -> int:
        """Tokens of its first prompt; the thinker writes nothing. Raises ApiError."""
        return await self._turns.count()

    async def give_up(self, status: Status) -> list[ResponseEvent]:
        """Ends its items and keeps what there is of it. Returns the events."""
        self.status = status
        events = [event for output in self._outputs for event in output.close("incomplete")]
        try:
            await self._keep(self)
        except ApiError as error:  # it has failed already; this says why it cannot be got later
            log.error("a response cannot be kept", request_id=self.spec.request_id, error=error.message)
        return events

    async def _end(self) -> None:
        """Raises ApiError: it cannot be kept."""
        answers = [turn.answer for turn in self._turn_outputs]
        if answers and self.spec.request.enable_response_messages:
            self._raw = await raw_messages(self._gateway, answers)
        self.status = "incomplete" if any(turn.is_cut_short for turn in self._turns.turns[-1:]) else "completed"
        if answers:
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
        """The events of turns and tools. Raises ApiError."""
        request = self.spec.request
        if not self.generates:
            await self._turns.count()
            for each in self._created():
                yield each
            return
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
                        rendered = await asyncio.to_thread(list, turn.close(ended, audio_format))
                    case ToolStart(name, members):
                        hosted = HostedOutput(len(self._outputs), name, members)
                        self._outputs.append(hosted)
                        rendered = hosted.open()
                    case ToolEvent():
                        assert hosted is not None
                        rendered = hosted.take(event)
                    case _:
                        rendered = turn.take(event)
                for each in (*self._created(), *rendered):
                    yield each

    def _next_turn(self) -> TurnOutput:
        self._turn_outputs.append(turn := TurnOutput(self.spec, self._outputs))
        return turn
