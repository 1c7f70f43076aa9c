"""The answer loop: the thinker's turns, and the tools that run here between them."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.tools.calls import HostedCall, HostedTool, Rules, json_object
from gateway.answers.tools.events import ToolFailure, ToolResult
from gateway.answers.turn import AnswerEvent, NextTurn, ToolCall, ToolStart, Turn, TurnEnd, sum_of
from gateway.errors import ApiError, in_own_terms
from gateway.pipeline.events import Finished, PromptRead, TextDelta
from gateway.pipeline.run import Job, run
from quartet.v1 import thinker_pb2
from services.common.errors import ContextTooLong, TooManyMedia


async def read_prompt(gateway: Gateway, job: Job, meter: Meter) -> thinker_pb2.PromptInfo:
    """The job's prompt, as the thinker reads it; nothing is written. Raises ApiError or StageError."""
    start, read = job.starts["thinker"], thinker_pb2.PromptInfo()
    start.count_only = True
    counted = replace(job, starts={"thinker": start})
    async with aclosing(run(gateway.pipeline, [counted], meter.left_s)) as events:
        async for _, event in events:
            if isinstance(event, PromptRead):
                read = event.tokens
    meter.log["prompt_tokens"] = read.prompt_tokens
    return read


class Dialog(Protocol):
    """The conversation that an answer belongs to, in a dialect's own form."""

    async def job(self, request_id: str, offers_tools: bool, is_first: bool) -> Job:
        """The job of the next turn.

        Args:
            request_id: of the turn.
            offers_tools: whether the model may call the tools that run here.
            is_first: whether the request's tool_choice counts: a call that it forces is made once.

        Raises:
            ApiError: 400 naming the field at fault.
        """
        ...

    def shorten(self) -> bool:
        """Leaves out the oldest messages, if the client allows that; whether it has done so."""
        ...

    def end_turn(self, turn: Turn) -> None:
        """Adds a turn whose calls run next."""

    def last_image(self) -> str | None:
        """URL of the last image, made here or sent by the user."""
        ...

    def add_result(self, call: ToolCall, event: ToolResult | ToolFailure) -> None:
        """Adds the result of a call."""

    def own_name(self, member: str) -> str:
        """The client's name of a field of the last job's request."""
        ...


class Turns:
    """One answer in turns.

    Args:
        tools: those that run here, by name.
        meter: its deadline is that of all turns and tools together.

    Attributes:
        turns: those that have finished.
    """

    def __init__(
        self, gateway: Gateway, dialog: Dialog, tools: Mapping[str, HostedTool], rules: Rules, meter: Meter
    ) -> None:
        self._gateway, self._dialog, self._tools, self._rules, self._meter = gateway, dialog, tools, rules, meter
        self.turns: list[Turn] = []
        self._calls = 0

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Asks until the model calls no tool that runs here. Closing the generator ends the work in every stage.

        Raises:
            ApiError: a turn failed. A tool that fails is an event, and the model goes on.
        """
        while True:
            is_offered = self._calls < self._rules.max_calls
            async with aclosing(self._turn(is_offered)) as events:
                async for event in events:
                    yield event
            turn = self.turns[-1]
            yield TurnEnd(turn)
            if not turn.hosted or turn.is_cut_short:
                return
            for call in turn.hosted.values():
                call.arguments = json_object(call.arguments)
            self._dialog.end_turn(turn)
            for call in turn.hosted.values():
                async with aclosing(self._call(call)) as results:
                    async for result in results:
                        yield result
            if turn.calls or not is_offered:  # the client's turn; or the model calls what it cannot see
                return

    async def as_one(self) -> AsyncGenerator[AnswerEvent, None]:
        """The events of all turns as those of one answer, whose text is that of all. Raises ApiError."""
        has_text = is_next = False
        async with aclosing(self.events()) as events:
            async for event in events:
                match event:
                    case TurnEnd():
                        is_next = has_text
                        continue
                    case TextDelta(delta) if delta.text:
                        if is_next:
                            yield TextDelta(thinker_pb2.GenerateDelta(text="\n\n"))
                        has_text, is_next = True, False
                yield event
        yield sum_of(self.turns)

    async def count(self) -> int:
        """Tokens of the first prompt; nothing is written. Raises ApiError."""
        while True:
            try:
                with in_own_terms(self._dialog.own_name):
                    job = await self._dialog.job(self._meter.request_id, offers_tools=True, is_first=True)
                    return (await read_prompt(self._gateway, job, self._meter)).prompt_tokens
            except ApiError as error:
                if not self._shortens(error):
                    raise

    async def _turn(self, is_offered: bool) -> AsyncGenerator[AnswerEvent, None]:
        """The thinker's next turn; a prompt that is too long is shortened. Raises ApiError."""
        number = len(self.turns)
        name = f"{self._meter.request_id}-{number}" if number else self._meter.request_id
        while True:
            turn = Turn(self._tools)
            try:
                with in_own_terms(self._dialog.own_name):
                    job = await self._dialog.job(name, is_offered, is_first=not number)
                    async with aclosing(run(self._gateway.pipeline, [job], self._meter.left_s)) as events:
                        async for _, event in events:
                            self._meter.observe(event)
                            match event:
                                case PromptRead(tokens) if number:
                                    yield NextTurn(tokens)
                                case TextDelta(delta):
                                    yield TextDelta(turn.take(delta))
                                case Finished():
                                    turn.end = event
                                    self.turns.append(turn)
                                case _:
                                    yield event
                return
            except ApiError as error:
                if turn.has_output or not self._shortens(error):
                    raise

    async def _call(self, call: ToolCall) -> AsyncGenerator[AnswerEvent, None]:
        """Runs a tool. A call beyond the limit fails, and the model reads why."""
        self._calls += 1
        rules, number, tool = self._rules, self._calls, self._tools[call.name]
        yield ToolStart(call.name, {} if tool.output else {"arguments": call.arguments})
        meter = replace(self._meter, request_id=f"{self._meter.request_id}-tool-{number}")
        hosted = HostedCall(call.arguments, self._dialog.last_image(), meter, rules)
        try:
            if number > rules.max_calls:
                reason = f"{rules.max_calls} calls of tools that run here are the most of a request"
                raise ApiError(400, reason, None, "too_many_calls")
            if rules.key is not None:
                rules.key.charge(1, "tools")
            async with aclosing(tool.events(self._gateway, hosted)) as events:
                async for event in events:
                    if isinstance(event, ToolResult):
                        self._dialog.add_result(call, event)
                    yield event
        except ApiError as error:
            self._meter.log.update(error.log)
            failure = ToolFailure(error, tool.output)
            self._dialog.add_result(call, failure)
            yield failure

    def _shortens(self, error: ApiError) -> bool:
        """Whether the prompt was too long, and is shorter now."""
        is_refused = isinstance(error.__cause__, ContextTooLong | TooManyMedia)
        return (is_refused or error.code == "context_length_exceeded") and self._dialog.shorten()
