"""Makes a response's items of the pipeline's events."""

from array import array

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, SampledAnswer
from gateway.dialects.realtime.events import new_id
from gateway.dialects.realtime.output.outbox import EventGate
from gateway.dialects.realtime.output.response_item import OutputCall, OutputMessage, ResponseItem
from gateway.dialects.realtime.output.sound_quality import SoundQuality
from gateway.dialects.realtime.output.tools import ToolOutput
from gateway.dialects.realtime.settings.session import Session
from gateway.pipeline.events import AudioDelta, Event, TextDelta, TextEnd
from quartet.v1 import thinker_pb2


class ResponseOutput:
    """The `output` of one response; without a conversation it is out of band. `quality`: of the session's sound."""

    def __init__(
        self,
        response_id: str,
        session: Session,
        conversation: Conversation | None,
        gate: EventGate,
        quality: SoundQuality | None = None,
    ) -> None:
        self._response_id, self._session, self._conversation = response_id, session, conversation
        self._gate, self._quality = gate, quality
        self._all: list[ResponseItem] = []
        self._message: OutputMessage | None = None
        self._calls: dict[int, OutputCall] = {}
        self._token_ids, self._ids_reusable = array("i"), False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def items(self) -> list[Item]:
        return [output.item for output in self._all]

    @property
    def played_at(self) -> float:
        return max((each.playback.ends_at for each in self._all if isinstance(each, OutputMessage)), default=0.0)

    def take(self, event: Event, rate_hz: int | None) -> None:
        """Adds what the pipeline made. `rate_hz`: of the model's sound; None: the answer is text."""
        match event:
            case TextDelta(delta):
                self._token_ids.extend(delta.token_ids)
                if delta.text:
                    self._gate.add(self._opened_message(rate_hz).text(delta.text))
                for call in delta.tool_calls:
                    self._call(call)
            case AudioDelta(pcm16):
                self._gate.add(self._opened_message(rate_hz).audio(pcm16))
            case TextEnd(summary):
                cut_short = summary.finish_reason == thinker_pb2.FINISH_REASON_LENGTH
                self._ids_reusable = summary.token_ids_reusable and not (cut_short and self._calls)
                for call in () if cut_short else self._calls.values():  # the client can run it before the sound ends
                    self._gate.add(call.close("completed"))

    def open_item(self, output: ResponseItem) -> None:
        self._all.append(output)
        output.conversation = self._conversation
        self._gate.add(output.open())

    def end_message(self) -> None:
        """Ends the message: further text starts another."""
        if self._message is not None:
            self._gate.add(self._message.close("completed"))
            self._message = None

    def close(self, status: str) -> None:
        """Ends all items by the response's `status`. They get the answer's token ids if these cover them all."""
        if status in ("cancelled", "failed"):
            self._gate.drop_sound()
            if self._message is not None:
                self._message.cut()
        elif self._ids_reusable and not any(each.item.is_cut or isinstance(each, ToolOutput) for each in self._all):
            sampled = SampledAnswer(self._token_ids, tuple(item.id for item in self.items))
            for item in self.items:
                item.sampled = sampled
        for output in self._all:
            self._gate.add(output.close(status))

    def _opened_message(self, rate_hz: int | None) -> OutputMessage:
        if self._message is None:
            self._message = OutputMessage(self._response_id, len(self._all), self._session, rate_hz, self._quality)
            self.open_item(self._message)
        return self._message

    def _call(self, delta: thinker_pb2.ToolCallDelta) -> None:
        if delta.index not in self._calls:
            # not the thinker's id: OpenAI's have at most 32 characters, and clients shorten longer ones
            call = OutputCall(self._response_id, len(self._all), delta.name, new_id("call"))
            self._calls[delta.index] = call
            self.open_item(call)
        if delta.arguments_json:
            self._gate.add(self._calls[delta.index].arguments(delta.arguments_json))
