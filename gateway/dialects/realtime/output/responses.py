"""One response of a realtime session: what the pipeline makes, told as events in the order of OpenAI's GA dialect."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from gateway import metrics
from gateway.access.api_keys import ApiKey
from gateway.answers.answer import Answer
from gateway.answers.gateway import Gateway
from gateway.answers.tools import image
from gateway.answers.tools.events import NextTurn
from gateway.answers.tools.schema import ImageTool
from gateway.answers.tools.turns import Turn, sum_of
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.conversation.prompt import Prompt
from gateway.dialects.realtime.events import RealtimeError, new_id
from gateway.dialects.realtime.output.drawing import image_tool, last_picture
from gateway.dialects.realtime.output.event_gate import EventGate
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.response_output import ResponseOutput
from gateway.dialects.realtime.output.server_events import ResponseEnd, ServerEvent
from gateway.dialects.realtime.output.usage import usage
from gateway.errors import ApiError, from_error, gateway_fault
from gateway.http.answer_span import with_firsts
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.events import AudioDelta, Event, Finished, PromptRead, TextDelta
from gateway.pipeline.run import run
from quartet.v1 import server_info_pb2
from services.common.rpc.errors import ContextTooLong, StageError, TooManyMedia
from services.common.telemetry.spans import Span

log = structlog.get_logger()


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        prompt: what is answered, and how.
        metadata: for the client's own use.
        conversation: that the answer is written to; None: to none.
        key: whose request it is; None where there are no keys.
        log: fields of the connection's log line, for what failed.
    """

    prompt: Prompt
    metadata: dict[str, Any] | None = None
    conversation: Conversation | None = None
    key: ApiKey | None = None
    log: dict[str, Any] = field(default_factory=dict)


class Response:
    """One response.

    Args:
        gateway: the gateway.
        request: what is asked for.
        outbox: takes the events.
        speculative: the events are held back until `release`; nothing is written to the conversation before.

    Attributes:
        id: names it.
        status: "in_progress", "completed", "cancelled", "failed" or "incomplete".
        was_speculative: its events were held back at first.
    """

    def __init__(self, gateway: Gateway, request: Request, outbox: Outbox, speculative: bool = False) -> None:
        self.id, self.status = new_id("resp"), "in_progress"
        self._gateway, self._request = gateway, request
        self._details: dict[str, Any] | None = None
        self._answer = Answer(0, self.id, 0)
        self._turns: list[Turn] = []
        self._tool = image_tool(request.prompt.session)
        self._paintings = 0
        self._gate = EventGate(outbox, request.conversation, speculative)
        self._outputs = ResponseOutput(self.id, request.prompt.session, request.conversation, self._gate)
        self._left_out: Sequence[Item] = ()
        self._task: asyncio.Task[None] | None = None
        self._made: asyncio.Task[None] | None = None
        self._reason: str | None = None
        self.was_speculative, self._log = speculative, dict[str, Any]()
        self._started, self._first_sound = time.monotonic(), 0.0

    @property
    def is_speculative(self) -> bool:
        """Whether the client was not told of it yet."""
        return self._gate.is_closed

    @property
    def played_at(self) -> float:
        """The `time.monotonic()` at which the client has played what it says, if it plays at once; 0: it is silent."""
        return self._outputs.played_at

    @property
    def head_start_s(self) -> float:
        """How much sooner its first sound was made, or will be, for having begun when it did instead of now."""
        return (self._first_sound or time.monotonic()) - self._started

    @property
    def _code2wav(self) -> server_info_pb2.Code2WavInfo | None:
        return self._gateway.pipeline.info("code2wav") if self._request.prompt.speaks(self._gateway) else None

    @property
    def _rate_hz(self) -> int | None:
        """Samples a second of its sound; None: it has none."""
        return None if self._code2wav is None else self._code2wav.sample_rate_hz

    def start(self) -> asyncio.Task[None]:
        """Begins; the task ends after response.done, or when it was dropped."""
        self._task = asyncio.create_task(self._run())
        return self._task

    async def cancel(self, reason: str) -> None:
        """Ends it, and returns when response.done was told.

        Args:
            reason: "client_cancelled" or "turn_detected".
        """
        assert self._task is not None
        self._reason = self._reason or reason
        if self._made is not None:
            self._made.cancel()
        await asyncio.wait([self._task])

    async def drop(self) -> None:
        """Ends it without a word: for what is held back, or a connection that is gone."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def release(self) -> None:
        """Tells what was held back; what follows is told at once."""
        await self._gate.release()

    async def _run(self) -> None:
        created = self._public()
        await self._gate.send(ServerEvent("response.created", {"response": created}))
        made = self._made = asyncio.create_task(self._make())
        if self._reason is not None:  # cancelled before it began
            made.cancel()
        try:
            await asyncio.wait([made])
        finally:
            made.cancel()
            await asyncio.shield(asyncio.gather(made, return_exceptions=True))
            self._judge(made)
            self._count()
        self._outputs.close(self.status)
        await self._gate.send(ResponseEnd("response.done", {"response": self._public()}, self._left_out))

    def _judge(self, made: asyncio.Task[None]) -> None:
        """Settles the status by how the work ended."""
        error = None if made.cancelled() else made.exception()
        if made.cancelled():
            self._settle("cancelled", reason=self._reason or "client_cancelled")
        elif error is not None:
            if not isinstance(error, ApiError):  # a bug
                log.error("realtime response failed", response_id=self.id, exc_info=error)
                error = gateway_fault()
            self._request.log.update(error.log)
            self._settle("failed", error={"type": error.kind, "code": error.code, "message": error.message})
        elif self._answer.finish_reason == "length":
            self._settle("incomplete", reason="max_output_tokens")
        else:
            self._settle("completed")

    def _settle(self, status: str, **details: Any) -> None:
        self.status, self._details = status, {"type": status, **details}

    async def _make(self) -> None:
        """Runs the pipeline. Raises ApiError."""
        key = self._request.key
        try:
            with (
                self._gateway.admission.admit(),
                nullcontext() if key is None else key.request(),
                metrics.RUNNING.track_inprogress(),
            ):
                await self._in_turns(self._offered(self._request.prompt))
        except StageError as error:
            raise from_error("gateway", error) from error

    def _offered(self, prompt: Prompt) -> Prompt:
        """The prompt with the tool, while it may be called."""
        if self._tool is None or self._paintings >= image.MAX_CALLS:
            return replace(prompt, tool=None)
        return replace(prompt, tool=image.function(self._tool))

    async def _in_turns(self, prompt: Prompt) -> None:
        """Has it answered, and made the pictures that the model asks for, until it asks for none."""
        items = list(prompt.items)
        while True:
            began = len(self._outputs)
            attempt: Prompt | None = prompt
            while attempt is not None:
                attempt = await self._answered(attempt)
            turn = self._turns[-1]
            if not turn.pictures or self._tool is None or turn.is_cut_short:
                return
            self._outputs.end_message()
            items += self._outputs.items[began:]
            for arguments in turn.pictures.values():
                items.append(await self._painted(self._tool, arguments, items))
            if turn.calls or self._paintings > image.MAX_CALLS:
                return
            self._answer.end = None
            prompt = replace(self._offered(prompt), items=[*items], is_free=True)

    async def _painted(self, tool: ImageTool, arguments: str, items: Sequence[Item]) -> Item:
        """The item of a picture, which is told of; made only for an answer that the client knows of."""
        await self._gate.released()
        self._paintings += 1
        output = self._outputs.new_picture()
        await self._gate.send()
        deadline = self._started + self._gateway.settings.request_timeout_s
        name = f"{self.id}-picture-{self._paintings}"
        painting = image.Painting(tool, arguments, last_picture(items), name, deadline, True, self._log)
        async with aclosing(painting.events(self._gateway)) as events:
            async for event in events:
                self._gate.add(output.take(event))
                await self._gate.send()
        return output.item

    async def _answered(self, prompt: Prompt) -> Prompt | None:
        """None, the prompt was answered; or a shorter one, as it is too long. What is left out of a conversation's
        prompt that is answered is forgotten: the next turn begins where this one did, for the thinker's prefix cache.

        Raises:
            StageError: as pipeline.run.
            ApiError: 400, there is no such prompt.
        """
        number, turn = len(self._turns), Turn()
        name = f"{self.id}-{number}" if number else self.id
        job = await asyncio.to_thread(prompt.job, self._gateway, name)
        limit_s = self._gateway.settings.request_timeout_s
        try:
            async with aclosing(run(self._gateway.pipeline, [job], limit_s)) as events:
                async for _, event in events:
                    event = self._of_turn(turn, event)
                    self._answer.take(event)
                    if not isinstance(event, NextTurn):
                        self._observe(event)
                        self._outputs.take(event, self._rate_hz)
                        await self._gate.send()
        except (ContextTooLong, TooManyMedia):
            shorter = None if self._outputs else prompt.shortened()
            if shorter is None:
                raise
            return shorter
        if self._request.conversation is not None and not number:
            asked, kept = self._request.prompt.items, prompt.retained(self._answer.prompt.prompt_tokens)
            self._left_out = asked[: len(asked) - len(kept.items)]
        return None

    def _of_turn(self, turn: Turn, event: Event) -> Event | NextTurn:
        """The event as one of all turns: without the calls that run here, where the tool is offered."""
        match event:
            case PromptRead(tokens) if self._turns:
                return NextTurn(tokens)
            case TextDelta(delta) if self._tool is not None:
                return TextDelta(turn.take(delta))
            case Finished():
                turn.end = event
                self._turns.append(turn)
                return sum_of(self._turns)
        return event

    def _observe(self, event: Event) -> None:
        elapsed_s = time.monotonic() - self._started
        if isinstance(event, TextDelta) and event.delta.token_ids:
            metrics.came(metrics.TTFT, elapsed_s, self._log)
        elif isinstance(event, AudioDelta):
            metrics.came(metrics.TTFA, elapsed_s, self._log)
            self._first_sound = self._first_sound or time.monotonic()

    def _count(self) -> None:
        """Counts what was made, whatever became of it, and logs it."""
        made = usage(self._answer, self._code2wav)
        metrics.PROMPT_TOKENS.inc(made["input_tokens"])
        metrics.TEXT_TOKENS.inc(made["output_token_details"]["text_tokens"])
        now = time.monotonic()
        elapsed_s = now - self._started
        span = Span(self.id, "gateway", self._started, now, self.status)
        self._gateway.spans.add(with_firsts(span, self._log))
        if self._answer.audio_bytes and self._rate_hz is not None:
            metrics.spoken(self._answer.audio_bytes / BYTES_PER_SAMPLE / self._rate_hz, elapsed_s)
        log.info(
            "realtime response",
            request_id=self.id,
            status=self.status,
            early=self.was_speculative,
            duration_ms=round(elapsed_s * 1000, 1),
            prompt_tokens=made["input_tokens"],
            cached_tokens=made["input_token_details"]["cached_tokens"],
            text_tokens=made["output_token_details"]["text_tokens"],
            frames=made["output_token_details"]["audio_tokens"],
            **self._log,
        )

    def _public(self) -> dict[str, Any]:
        """OpenAI's form of it, as it is now."""
        session, request = self._request.prompt.session, self._request
        output = session.public()["audio"]["output"]
        audio = {name: output[name] for name in ("format", "voice") if output.get(name) is not None}
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": self.status,
            "status_details": self._details,
            "output": [item.public() for item in self._outputs.items] if self._details else [],
            "conversation_id": None if request.conversation is None else request.conversation.id,
            "output_modalities": list(session.modalities),
            "max_output_tokens": "inf" if session.max_output_tokens is None else session.max_output_tokens,
            "audio": {"output": audio},
            "usage": usage(self._answer, self._code2wav) if self._details else None,
            "metadata": request.metadata,
        }


def check_metadata(metadata: Any) -> dict[str, Any] | None:
    """Raises RealtimeError: it is no mapping of texts."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        message = "response.metadata: must be a mapping of texts to texts"
        raise RealtimeError("invalid_value", message, "response.metadata")
    return metadata
