"""One response of a realtime session: events in the order of OpenAI's GA dialect."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import structlog

from gateway import metrics
from gateway.access.api_key import ApiKey
from gateway.answers.answer import Answer
from gateway.answers.answer import usage as chat_usage
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.tools.calls import Rules
from gateway.answers.tools.events import ToolEvent
from gateway.answers.turn import NextTurn, ToolStart, TurnEnd, sum_of
from gateway.answers.turns import Turns
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.conversation.prompt import Prompt
from gateway.dialects.realtime.events import new_id, wrong
from gateway.dialects.realtime.output.outbox import EventGate, EventSink
from gateway.dialects.realtime.output.prompt_dialog import PromptDialog
from gateway.dialects.realtime.output.response_output import ResponseOutput
from gateway.dialects.realtime.output.server_events import ResponseEnd, ServerEvent
from gateway.dialects.realtime.output.sound_quality import SoundQuality
from gateway.dialects.realtime.output.tools import ToolOutput, hosted_tools
from gateway.errors import ApiError, gateway_fault, in_own_terms
from gateway.http.answer_span import with_firsts
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.events import AudioDelta, Finished
from gateway.tasks import cancel
from quartet.v1 import server_info_pb2
from services.common.telemetry.spans import Span

log = structlog.get_logger()


@dataclass(frozen=True)
class Request:
    """What a response answers.

    Attributes:
        prompt: with the session's settings.
        metadata: for the client's own use.
        conversation: that the answer is added to; None: to none.
        key: whose request it is; None where there are no keys.
        log: fields of the connection's log line.
        quality: of the session's sound.
    """

    prompt: Prompt
    metadata: dict[str, Any] | None = None
    conversation: Conversation | None = None
    key: ApiKey | None = None
    log: dict[str, Any] = field(default_factory=dict)
    quality: SoundQuality | None = None


class Response:
    """One response.

    Args:
        speculative: the events are held back until `release`; the conversation does not change before.

    Attributes:
        status: "in_progress", "completed", "cancelled", "failed" or "incomplete".
        task: ends after response.done or `drop`.
    """

    def __init__(self, gateway: Gateway, request: Request, outbox: EventSink, speculative: bool = False) -> None:
        self.id, self.status = new_id("resp"), "in_progress"
        self._gateway, self._request = gateway, request
        self._details: dict[str, Any] | None = None
        self._answer = Answer(0, self.id, 0)
        self._gate = EventGate(outbox, request.conversation, speculative)
        self._outputs = ResponseOutput(
            self.id, request.prompt.session, request.conversation, self._gate, request.quality
        )
        tools = {tool.name: tool for _, tool in hosted_tools(request.prompt.session)}
        self._dialog = PromptDialog(gateway, request.prompt, tools.values(), self._outputs, request.key)
        self._meter = Meter(self.id, gateway.settings.request_timeout_s, key=request.key)
        self._turns = Turns(gateway, self._dialog, tools, Rules(previews=True, key=request.key), self._meter)
        self._left_out: Sequence[Item] = ()
        self._made: asyncio.Task[None] | None = None
        self._reason: str | None = None
        self._was_speculative, self._first_sound = speculative, 0.0
        self.task = asyncio.create_task(self._run())

    @property
    def is_speculative(self) -> bool:
        """Whether its events are held back."""
        return not self._gate.open.is_set()

    @property
    def played_at(self) -> float:
        """`time.monotonic()` when a client that plays at once has played all; 0: it has no sound yet."""
        return self._outputs.played_at

    @property
    def head_start_s(self) -> float:
        """Time from its beginning to its first sound, or until now."""
        return (self._first_sound or time.monotonic()) - self._meter.arrived

    @property
    def _code2wav(self) -> server_info_pb2.Code2WavInfo | None:
        return self._gateway.pipeline.info("code2wav") if self._request.prompt.speaks(self._gateway) else None

    @property
    def _rate_hz(self) -> int | None:
        """None: it has no sound."""
        return None if self._code2wav is None else self._code2wav.sample_rate_hz

    async def cancel(self, reason: str) -> None:
        """Ends it with response.done. `reason`: "client_cancelled" or "turn_detected"."""
        self._reason = self._reason or reason
        if self._made is not None:
            self._made.cancel()
        await asyncio.wait([self.task])

    async def drop(self) -> None:
        """Ends it without further events."""
        await cancel(self.task)

    async def release(self) -> None:
        """Sends the events that were held back."""
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
            await cancel(made)
            self._judge(made)
            self._count()
        self._outputs.close(self.status)
        await self._gate.send(ResponseEnd("response.done", {"response": self._public()}, self._left_out))

    def _judge(self, made: asyncio.Task[None]) -> None:
        """Settles the status. `made` has ended."""
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
        with (
            in_own_terms(),
            self._gateway.admission.admit(),
            nullcontext() if key is None else key.request(),
            metrics.RUNNING.track_inprogress(),
        ):
            await self._answered()

    async def _answered(self) -> None:
        """Makes client events of the answer loop's. Raises ApiError."""
        call: ToolOutput | None = None
        async with aclosing(self._turns.events()) as events:
            async for event in events:
                match event:
                    case TurnEnd(turn):
                        self._answer.take(sum_of(self._turns.turns))
                        if len(self._turns.turns) == 1:
                            self._left_out = self._dialog.left_out(self._answer.prompt.prompt_tokens)
                        if turn.hosted and not turn.is_cut_short:
                            self._outputs.end_message()
                    case ToolStart(name, members):
                        await self._gate.open.wait()  # a tool runs only for an answer that the client knows of
                        call = ToolOutput(self.id, len(self._outputs), name, members)
                        self._outputs.open_item(call)
                    case ToolEvent():
                        assert call is not None
                        self._gate.add(call.take(event))
                    case NextTurn():
                        self._answer.end = Finished()
                        self._answer.take(event)
                        continue
                    case _:
                        self._answer.take(event)
                        if isinstance(event, AudioDelta):
                            self._first_sound = self._first_sound or time.monotonic()
                        self._outputs.take(event, self._rate_hz)
                await self._gate.send()

    def _count(self) -> None:
        """Counts what was made, also if it failed, and logs it."""
        made, meter = usage(self._answer, self._code2wav), self._meter
        details, elapsed_s = made["output_token_details"], meter.elapsed_s
        span = Span(self.id, "gateway", meter.arrived, time.monotonic(), self.status)
        self._gateway.spans.add(with_firsts(span, meter.log))
        meter.count(made["input_tokens"], details["text_tokens"], details["audio_tokens"])
        if self._answer.audio_bytes and self._rate_hz is not None:
            seconds = self._answer.audio_bytes / BYTES_PER_SAMPLE / self._rate_hz
            metrics.spoken(seconds, elapsed_s)
            meter.owe(seconds)
        log.info(
            "realtime response",
            request_id=self.id,
            status=self.status,
            early=self._was_speculative,
            duration_ms=round(elapsed_s * 1000, 1),
            cached_tokens=made["input_token_details"]["cached_tokens"],
            **meter.log,
        )

    def _public(self) -> dict[str, Any]:
        """OpenAI's form of it."""
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
    is_mapping = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not is_mapping:
        raise wrong("response.metadata", "must be a mapping of texts to texts")
    return metadata


def usage(answer: Answer, code2wav: server_info_pb2.Code2WavInfo | None) -> dict[str, Any]:
    """Tokens by kind. A codec frame is an audio token; of an answer that was cut short those that arrived count."""
    total = chat_usage([answer])
    read, written = total["prompt_tokens_details"], total["completion_tokens_details"]
    per_frame = code2wav.samples_per_frame if code2wav else 0
    arrived = answer.audio_bytes // BYTES_PER_SAMPLE // per_frame if per_frame else 0
    audio, text = written["audio_tokens"] or arrived, written["text_tokens"]
    return {
        "input_tokens": total["prompt_tokens"],
        "input_token_details": read,
        "output_tokens": text + audio,
        "output_token_details": {"text_tokens": text, "audio_tokens": audio},
        "total_tokens": total["prompt_tokens"] + text + audio,
    }
