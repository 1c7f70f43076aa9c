"""The order in which OpenAI's GA dialect sends its events. Clients of others rely on it, and so does this."""

from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
_ENDS = {"completed": "completed", "cancelled": "incomplete", "incomplete": "incomplete", "failed": "incomplete"}
_DELTAS = {
    "response.output_text.delta": "response.output_text.done",
    "response.output_audio.delta": "response.output_audio.done",
    "response.output_audio_transcript.delta": "response.output_audio_transcript.done",
    "response.function_call_arguments.delta": "response.function_call_arguments.done",
}
_DONES = {done: delta for delta, done in _DELTAS.items()}
_TEXTS = {
    "response.output_text.done": "text",
    "response.output_audio_transcript.done": "transcript",
    "response.function_call_arguments.done": "arguments",
}


@dataclass
class _Output:
    """An item of a response, as told so far."""

    item: Event
    in_conversation: bool = False
    part_is_open: bool = False
    deltas: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    is_done: bool = False


@dataclass
class _Response:
    """A response that was created and is not done."""

    members: Event
    outputs: list[_Output] = field(default_factory=list)


class Order:
    """Checks the events of a session, one after another. What is out of order is an AssertionError.

    Attributes:
        responses: those that are done.
    """

    def __init__(self) -> None:
        self.responses: list[Event] = []
        self._ids: set[str] = set()
        self._open: dict[str, _Response] = {}
        self._items: list[str] = []
        self._deleted: set[str] = set()
        self._speaking: str | None = None  # the item that speech_started names
        self._stopped: str | None = None  # the same of speech_stopped, until it is committed
        self._committed: tuple[str, str | None] | None = None
        self._undone: set[str] = set()  # items of the user that were added

    @property
    def idle(self) -> bool:
        """Whether all that was begun is done."""
        return not (self._open or self._undone or self._committed)

    def see(self, event: Event) -> None:
        """The next event."""
        kind = event["type"]
        assert event["event_id"] not in self._ids, "an event's id comes twice"
        if kind != "error":
            assert bool(self._ids) != (kind == "session.created"), f"{kind} comes first, or session.created again"
        self._ids.add(event["event_id"])
        if self._committed is not None:
            assert kind == "conversation.item.added", f"{kind} comes between committed and its item"
        if self._undone:  # an item that is whole is done at once
            assert kind == "conversation.item.done", f"{kind} comes between an item's added and done"
        if kind.startswith("response."):
            self._response(kind, event)
        elif kind.startswith("input_audio_buffer."):
            self._buffer(kind.removeprefix("input_audio_buffer."), event)
        elif kind.startswith("conversation.item."):
            self._item(kind.removeprefix("conversation.item."), event)

    def _buffer(self, kind: str, event: Event) -> None:
        match kind:
            case "speech_started" | "timeout_triggered":
                assert self._speaking is None, "speech starts twice"
                assert event["item_id"] not in self._items
                self._speaking = event["item_id"]
                if kind == "timeout_triggered":
                    self._stopped = self._speaking
            case "speech_stopped":
                assert self._speaking == event["item_id"], "speech stops that did not start"
                self._stopped = self._speaking
            case "committed":
                assert self._stopped in (None, event["item_id"]), "another item is committed than the one that was said"
                self._committed = event["item_id"], event["previous_item_id"]
                self._speaking = self._stopped = None
            case "cleared":
                self._speaking = self._stopped = None

    def _item(self, kind: str, event: Event) -> None:
        item: Event = event.get("item") or {"id": event["item_id"]}
        if kind == "added":
            if self._committed is not None:
                assert (item["id"], event["previous_item_id"]) == self._committed
                self._committed = None
            assert item["id"] not in self._items, "an item is added twice"
            self._place(item["id"], event["previous_item_id"])
            output = self._output_of(item["id"])
            if output is None:
                self._undone.add(item["id"])
            else:
                assert not output.deltas
                assert not output.part_is_open
                output.in_conversation = True
        elif kind == "done":
            output = self._output_of(item["id"])
            if output is None:
                self._undone.remove(item["id"])
            else:
                assert output.is_done, "the conversation's item is done before the response's"
                assert output.in_conversation, "an item is done that was not added, or twice"
                output.in_conversation = False
        elif kind == "deleted":
            self._items.remove(item["id"])
            self._deleted.add(item["id"])
        else:  # retrieved, truncated, input_audio_transcription.*
            assert item["id"] in {*self._items, *self._deleted}, f"{kind} of an item that nobody was told of"

    def _place(self, id: str, previous: str | None) -> None:
        assert previous is None or previous in self._items, "the item before it is not known"
        self._items.insert(0 if previous is None else self._items.index(previous) + 1, id)

    def _output_of(self, id: str) -> _Output | None:
        outputs = (output for response in self._open.values() for output in response.outputs)
        return next((output for output in outputs if output.item["id"] == id), None)

    def _response(self, kind: str, event: Event) -> None:
        if kind == "response.created":
            response = event["response"]
            assert response["status"] == "in_progress"
            done = [each["id"] for each in self.responses]
            assert response["id"] not in {*self._open, *done}, "a response is created twice"
            others = [each for each in self._open.values() if each.members["conversation_id"] is not None]
            assert response["conversation_id"] is None or not others, "two responses write to the conversation"
            self._open[response["id"]] = _Response(response)
        elif kind == "response.done":
            self._done(event["response"])
        else:
            response = self._open.get(event["response_id"])
            assert response is not None, f"{kind} of a response that is not under way"
            self._within(kind, event, response)

    def _done(self, told: Event) -> None:
        response = self._open.pop(told["id"])
        assert told["status"] in _ENDS
        assert told["status_details"] is None or told["status_details"]["type"] == told["status"]
        assert [item["id"] for item in told["output"]] == [output.item["id"] for output in response.outputs]
        for item, output in zip(told["output"], response.outputs, strict=True):
            assert output.is_done, "a response is done before its items"
            assert not output.in_conversation, "a response is done before the conversation's item"
            assert item == output.item, f"an item is told otherwise at the end {item} {output.item}"
            if item["type"] == "message" and output is response.outputs[-1]:  # those of earlier turns are complete
                assert item["status"] == _ENDS[told["status"]]
        self.responses.append(told)

    def _within(self, kind: str, event: Event, response: _Response) -> None:
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(response.outputs), "items of a response have no gaps"
            assert event["item"]["status"] == "in_progress"
            response.outputs.append(_Output(event["item"]))
            return
        output = response.outputs[index]
        assert not output.is_done, f"{kind} of an item that is done"
        if kind == "response.output_item.done":
            assert event["item"]["id"] == output.item["id"]
            assert not output.part_is_open, "an item is done before its part"
            output.item, output.is_done = event["item"], True
            return
        assert event["item_id"] == output.item["id"]
        if response.members["conversation_id"] is not None:
            assert output.in_conversation, f"{kind} before conversation.item.added"
        self._content(kind, event, output)

    def _content(self, kind: str, event: Event, output: _Output) -> None:
        is_call = output.item["type"].endswith("_call")
        if kind == "response.content_part.added":
            assert not output.part_is_open
            assert not output.ended
            output.part_is_open = True
        elif kind == "response.content_part.done":
            assert output.part_is_open
            assert set(output.deltas) <= {_DONES[done] for done in output.ended}, "a part is done before its contents"
            output.part_is_open = False
        elif kind in _DELTAS:
            assert output.part_is_open or is_call, f"{kind} before its part"
            assert _DELTAS[kind] not in output.ended, f"{kind} after {_DELTAS[kind]}"
            assert event["delta"], "an empty delta"
            output.deltas[kind] = output.deltas.get(kind, "") + event["delta"]
        else:
            assert output.part_is_open or is_call, f"{kind} before its part"
            assert kind not in output.ended or kind.endswith("partial_image"), f"{kind} comes twice"
            output.ended.append(kind)
            if kind in _TEXTS:  # of what is interrupted the text may end before what was sent
                text, sent = event[_TEXTS[kind]], output.deltas.get(_DONES[kind], "")
                assert sent.startswith(text), "the whole text is another than its parts"
