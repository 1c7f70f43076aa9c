"""The items of one response: what of the pipeline's events each of them is made of."""

from array import array

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, Sampled
from gateway.dialects.realtime.events import new_id
from gateway.dialects.realtime.output.drawing import PictureOutput
from gateway.dialects.realtime.output.event_gate import Telling
from gateway.dialects.realtime.output.output_item import CallOutput, MessageOutput, Output
from gateway.dialects.realtime.settings.session import Session
from gateway.pipeline.events import AudioDelta, Event, TextDelta, TextEnd
from quartet.v1 import thinker_pb2


class Outputs:
    """Those of one response.

    Args:
        response_id: of the response.
        session: how it sounds.
        conversation: that they are written to; None: to none.
        telling: takes what is to be told of them.
    """

    def __init__(self, response_id: str, session: Session, conversation: Conversation | None, telling: Telling) -> None:
        self._response_id, self._session, self._conversation = response_id, session, conversation
        self._telling = telling
        self._all: list[Output] = []
        self._message: MessageOutput | None = None
        self._calls: dict[int, CallOutput] = {}
        self._token_ids, self._ids_reusable = array("i"), False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def items(self) -> list[Item]:
        """Of the conversation, in order."""
        return [output.item for output in self._all]

    @property
    def played_at(self) -> float:
        """The `time.monotonic()` at which the client has played what is said, if it plays at once; 0: it is silent."""
        return max((each.played_at for each in self._all if isinstance(each, MessageOutput)), default=0.0)

    def take(self, event: Event, rate_hz: int | None) -> None:
        """Text, sound or calls of the model.

        Args:
            event: of the pipeline.
            rate_hz: samples a second of the sound; None: the answer is text only.
        """
        match event:
            case TextDelta(delta):
                self._token_ids.extend(delta.token_ids)
                if delta.text:
                    self._telling.add(self._said(rate_hz).text(delta.text))
                for call in delta.tool_calls:
                    self._call(call)
            case AudioDelta(pcm16):
                self._telling.add(self._said(rate_hz).audio(pcm16))
            case TextEnd(summary):
                cut_short = summary.finish_reason == thinker_pb2.FINISH_REASON_LENGTH
                self._ids_reusable = summary.token_ids_reusable and not (cut_short and self._calls)
                for call in () if cut_short else self._calls.values():  # who runs it need not wait for the sound's end
                    self._telling.add(call.close("completed"))

    def new_picture(self) -> PictureOutput:
        """A picture that the model asks for. What it says next is a message of its own."""
        picture = PictureOutput(self._response_id, len(self._all))
        self._open(picture)
        return picture

    def end_message(self) -> None:
        """Its turn is over: what the model says next is another message."""
        if self._message is not None:
            self._telling.add(self._message.close("completed"))
            self._message = None

    def close(self, status: str) -> None:
        """Ends all, as the response's `status` says. The answer's ids stay with its items, if they say what all of its
        items do."""
        if status in ("cancelled", "failed"):
            self._telling.drop_sound()
            if self._message is not None:
                self._message.cut()
        elif self._ids_reusable and not any(each.item.is_cut or isinstance(each, PictureOutput) for each in self._all):
            sampled = Sampled(self._token_ids, tuple(item.id for item in self.items))
            for item in self.items:
                item.sampled = sampled
        for output in self._all:
            self._telling.add(output.close(status))

    def _said(self, rate_hz: int | None) -> MessageOutput:
        """The message of the answer, opened."""
        if self._message is None:
            self._message = MessageOutput(self._response_id, len(self._all), self._session, rate_hz)
            self._open(self._message)
        return self._message

    def _call(self, delta: thinker_pb2.ToolCallDelta) -> None:
        if delta.index not in self._calls:
            # not the thinker's id: OpenAI's have at most 32 characters, and clients shorten longer ones
            call = CallOutput(self._response_id, len(self._all), delta.name, new_id("call"))
            self._calls[delta.index] = call
            self._open(call)
        if delta.arguments_json:
            self._telling.add(self._calls[delta.index].arguments(delta.arguments_json))

    def _open(self, output: Output) -> None:
        self._all.append(output)
        output.conversation = self._conversation
        self._telling.add(output.open())
