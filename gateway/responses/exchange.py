"""Makes a response: runs the pipeline as often as the tools that run here ask for, and tells of it as OpenAI does."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Any

import structlog

from gateway import metrics
from gateway.errors import ApiError, from_error, gateway_fault
from gateway.gateway import Gateway
from gateway.hosted_tools import image as image_tool
from gateway.hosted_tools import makers
from gateway.hosted_tools.schema import IMAGE_TOOL
from gateway.openai.chat_requests import to_jobs
from gateway.openai.schema import ChatCompletionRequest, Tool
from gateway.pipeline.events import AudioDelta, Event, PromptRead, TextDelta
from gateway.pipeline.run import Job, run
from gateway.responses.asked import Asked, Status, usage_of
from gateway.responses.messages import Messages, chat_request, in_items_terms, last_picture
from gateway.responses.output import HostedOutput, OutputItem, Told
from gateway.responses.parts import Item
from gateway.responses.turn import HostedCall, Turn
from services.common.errors import StageError

log = structlog.get_logger()


class Exchange:
    """Makes one response.

    Args:
        gateway: the gateway.
        asked: what it is to be.
        keep: called when it has ended, before the client is told so; may raise ApiError.

    Attributes:
        status: how far it is.
        error: what it failed with, if it has.
    """

    def __init__(self, gateway: Gateway, asked: Asked, keep: Callable[["Exchange"], Awaitable[None]]) -> None:
        self._gateway, self.asked, self._keep = gateway, asked, keep
        self.status: Status = "queued" if asked.request.background else "in_progress"
        self._context = [*asked.earlier, *((f"input[{i}]", item) for i, item in enumerate(asked.items))]
        self._outputs: list[OutputItem] = []
        self._turns: list[Turn] = []
        self.error: ApiError | None = None
        self._sequence, self._is_told = 0, False

    @property
    def output(self) -> list[Item]:
        """Its items, as they are now."""
        return [output.item for output in self._outputs]

    def public(self) -> dict[str, Any]:
        """Its object, as it is now."""
        return self.asked.public(self.status, self.output, [turn.answer for turn in self._turns], self.error)

    async def events(self) -> AsyncGenerator[Told, None]:
        """What happens, as it does. Closing the generator ends the work in every stage.

        Raises:
            ApiError: before the first event. Later that is an event, response.failed.
        """
        try:
            if self.asked.request.background:
                for event in self._created():
                    yield self._numbered(event)
            async with aclosing(self._made()) as events:
                async for event in events:
                    yield self._numbered(event)
            await self._end()
        except ApiError as error:
            self.asked.log.update(error.log)
            if not self._is_told:
                raise
            self.error = error
        except Exception:
            log.exception("response failed", request_id=self.asked.request_id)
            if not self._is_told:
                raise
            self.error = gateway_fault()
        if self.error is not None:
            for event in await self._give_up("failed"):
                yield self._numbered(event)
        yield self._numbered({"type": f"response.{self.status}", "response": self.public()})

    async def count(self) -> int:
        """Tokens of its first prompt, as the thinker reads it; nothing is written. Raises ApiError."""
        self._turns.append(Turn(self.asked, self._outputs))
        while True:
            try:
                return await self._count()
            except ApiError as error:
                if error.code != "context_length_exceeded" or not self._shorten():
                    raise

    async def _count(self) -> int:
        tokens, messages = 0, self._messages()
        with self._in_own_terms(messages):
            job = await self._job(self._chat(messages), self.asked.request_id)
            start = job.starts["thinker"]
            start.count_only = True
            async with aclosing(self._run(replace(job, starts={"thinker": start}))) as events:
                async for event in events:
                    if isinstance(event, PromptRead):
                        tokens = event.tokens.prompt_tokens
        self.asked.log["prompt_tokens"] = tokens
        return tokens

    async def cancelled(self) -> None:
        """It was cancelled, and its events have been closed: what there is of it is kept."""
        await self._give_up("cancelled")

    async def _give_up(self, status: Status) -> list[Told]:
        self.status = status
        events = [event for output in self._outputs for event in output.close("incomplete")]
        try:
            await self._keep(self)
        except ApiError as error:  # it has failed already; this says why it cannot be got later
            log.error("a response cannot be kept", request_id=self.asked.request_id, error=error.message)
        return events

    async def _end(self) -> None:
        """Settles the status, counts, and keeps it. Raises ApiError: it cannot be kept."""
        self.status = "incomplete" if self._turns[-1].is_cut_short else "completed"
        answers = [turn.answer for turn in self._turns]
        for answer in answers:
            if answer.audio_bytes:
                metrics.spoken(answer.audio_s, time.monotonic() - self.asked.arrived)
        tokens = usage_of(answers)
        details = tokens["output_tokens_details"]
        metrics.PROMPT_TOKENS.inc(tokens["input_tokens"])
        metrics.TEXT_TOKENS.inc(details["text_tokens"])
        self.asked.log |= {
            "prompt_tokens": tokens["input_tokens"],
            "text_tokens": details["text_tokens"],
            "frames": details["audio_tokens"],
        }
        await self._keep(self)

    def _numbered(self, event: Told) -> Told:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return event

    def _created(self) -> list[Told]:
        """The first events, once."""
        if self._is_told:
            return []
        self._is_told = True
        response = self.public()
        return [{"type": name, "response": response} for name in ("response.created", f"response.{self.status}")]

    async def _made(self) -> AsyncGenerator[Told, None]:
        """What the thinker writes and the tools make, in turn."""
        while True:
            async with aclosing(self._answer()) as events:
                async for event in events:
                    yield event
            turn = self._turns[-1]
            if not turn.hosted or turn.is_cut_short:
                return
            self._context += [("output", output.item) for output in turn.outputs]
            for call in turn.hosted.values():
                async with aclosing(self._hosted(call)) as events:
                    async for event in events:
                        yield event
                self._context.append(("output", self._outputs[-1].item))
            if turn.calls_client:
                return

    async def _hosted(self, call: HostedCall) -> AsyncGenerator[Told, None]:
        """Runs a tool that the model calls."""
        asked, picture = self.asked, last_picture([item for _, item in self._context])
        output = HostedOutput(len(self._outputs), call.name)
        self._outputs.append(output)
        name = f"{asked.request_id}-{len(self._outputs)}"
        deadline = asked.arrived + self._gateway.settings.request_timeout_s
        if call.name == IMAGE_TOOL:
            assert asked.tools.image is not None
            shows = bool(asked.request.stream)
            running = image_tool.Painting(asked.tools.image, call.arguments, picture, name, deadline, shows, asked.log)
        else:
            tool, _ = asked.tools.makers[call.name]
            running = makers.Making(tool, call.arguments, picture, name, deadline, asked.owner, asked.hold, asked.log)
        for event in output.open():
            yield event
        async with aclosing(running.events(self._gateway)) as steps:
            async for step in steps:
                for event in output.take(step):
                    yield event

    async def _answer(self) -> AsyncGenerator[Told, None]:
        """The thinker's next turn; a prompt that is too long is made shorter, if the client allows. Raises ApiError."""
        while True:
            self._turns.append(turn := Turn(self.asked, self._outputs))
            try:
                async with aclosing(self._attempt(turn)) as events:
                    async for event in events:
                        yield event
                return
            except ApiError as error:
                if error.code != "context_length_exceeded" or turn.outputs or not self._shorten():
                    raise
                self._turns.pop()

    def _shorten(self) -> bool:
        """Leaves out the oldest quarter of the items, the last one never; whether that is done."""
        count = max(1, (len(self._context) - 1) // 4)
        if self.asked.request.truncation != "auto" or len(self._context) <= count:
            return False
        kept = self._context[count:]
        called = {item["call_id"] for _, item in kept if item["type"] == "function_call"}
        is_answered = lambda item: item["type"] != "function_call_output" or item["call_id"] in called  # noqa: E731
        self._context = [(place, item) for place, item in kept if is_answered(item)]
        return bool(self._context)

    async def _attempt(self, turn: Turn) -> AsyncGenerator[Told, None]:
        messages = self._messages()
        with self._in_own_terms(messages):
            chat = self._chat(messages)
            number = len(self._turns) - 1
            job = await self._job(chat, f"{self.asked.request_id}-{number}" if number else self.asked.request_id)
            async with aclosing(self._run(job)) as events:
                async for event in events:
                    self._observe(event)
                    self.status = "in_progress"
                    for told in (*self._created(), *turn.take(event)):
                        yield told
        for told in await asyncio.to_thread(lambda: list(turn.close(chat.audio_format))):
            yield told

    def _in_own_terms(self, messages: Messages) -> AbstractContextManager[None]:
        return in_items_terms(messages, self._offered()[1])

    async def _job(self, chat: ChatCompletionRequest, request_id: str) -> Job:
        (job,) = await to_jobs(self._gateway, chat, request_id, self.asked.owner)
        return replace(job, conversation_id=self._conversation_id)

    async def _run(self, job: Job) -> AsyncGenerator[Event, None]:
        """What the stages bring. Raises ApiError."""
        left_s = max(0.0, self.asked.arrived + self._gateway.settings.request_timeout_s - time.monotonic())
        try:
            async with aclosing(run(self._gateway.pipeline, [job], left_s)) as events:
                async for _, event in events:
                    yield event
        except StageError as error:
            raise from_error("gateway", error) from error

    def _messages(self) -> Messages:
        thinker = self._gateway.pipeline.info("thinker")
        messages = Messages(sees_images=thinker is not None and "image" in thinker.input_modalities)
        if self.asked.request.instructions:
            said = [{"type": "input_text", "text": self.asked.request.instructions}]
            messages.add("instructions", {"type": "message", "role": "system", "content": said})
        for place, item in self._context:
            messages.add(place, item)
        return messages

    def _chat(self, messages: Messages) -> ChatCompletionRequest:
        tools, request = self.asked.tools, self.asked.request
        offered, _ = self._offered()
        # what was to be called has been: from then on the model is free to say something
        choice = tools.choice if len(self._turns) == 1 or not offered else None
        return chat_request(request, messages.messages, offered, choice if offered else None)

    def _offered(self) -> tuple[list[Tool], list[str]]:
        """(the tools that the model may call now, where in the request each is)."""
        tools = self.asked.tools
        offered, places = list(tools.functions), list(tools.places)
        made = sum(len(turn.hosted) for turn in self._turns)
        if made < (self.asked.request.max_tool_calls or image_tool.MAX_CALLS):
            if tools.image is not None:
                offered.append(image_tool.function(tools.image))
                places.append(tools.image_place)
            for name, (_, place) in tools.makers.items():
                offered.append(makers.function(name))
                places.append(place)
        return offered, places

    @property
    def _conversation_id(self) -> str:
        """What the choice of the thinker goes by: the others of the conversation went there too. "": the prompt."""
        request = self.asked.request
        name = request.conversation.id if request.conversation else request.prompt_cache_key
        return f"{self.asked.owner or ''}/{name}" if name else ""

    def _observe(self, event: Event) -> None:
        elapsed_s = time.monotonic() - self.asked.arrived
        if isinstance(event, TextDelta) and event.delta.token_ids:
            metrics.came(metrics.TTFT, elapsed_s, self.asked.log)
        elif isinstance(event, AudioDelta):
            metrics.came(metrics.TTFA, elapsed_s, self.asked.log)
