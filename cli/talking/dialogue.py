"""State of a spoken conversation: handles each server event and returns the client's replies."""

import base64
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cli.http import message
from cli.talking.sound import InputMeter, PlaybackBuffer

USER, MODEL, NOTE, ERROR = "you", "model", "", "error"
MARK = "mark-"  # prefix of event ids that probe how far the server has read
_ROOM_S = 0.3  # echo in the room, and sound in the buffers of the devices
_NO_TURN = "input_audio_buffer_commit_empty"
_HARMLESS = {"response_cancel_not_active"}  # it ended meanwhile

Event = dict[str, Any]


@dataclass
class TurnTiming:
    """A turn and its answer, in seconds of one clock.

    Attributes:
        said_s: when the user's last sample was sent.
        answered_s: when the answer's first sound arrived, or text if it has none.
    """

    said_s: float | None
    answered_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        return None if self.answered_s is None or self.said_s is None else self.answered_s - self.said_s


@dataclass
class AnswerItem:
    id: str
    text: str = ""
    is_done: bool = False


class Dialogue:
    """A conversation's state. Knows no socket, device or clock.

    Args:
        say: prints a line: speaker and text.
        may_interrupt: the microphone does not pick up the speakers.
        is_written: answers are text.

    Attributes:
        first: which part of an answer comes first, "audio" or "text".
        user_text: transcript of the user's turn so far.
        untranscribed: ids of the user's turns whose transcripts are awaited.
        answer: the current item.
        read: number of marks that the server has read.
        tokens: of all answers: "input", "cached" (of the input) and "output".
    """

    def __init__(
        self,
        playback: PlaybackBuffer,
        sent: InputMeter,
        say: Callable[[str, str], None],
        *,
        may_interrupt: bool = False,
        is_written: bool = False,
        is_transcribed: bool = True,
    ) -> None:
        self._playback, self._sent, self._say = playback, sent, say
        self._may_interrupt, self._is_transcribed = may_interrupt, is_transcribed
        self.first = "text" if is_written else "audio"
        self.turns: list[TurnTiming] = []
        self.interruptions, self.tokens, self.read = 0, Counter[str](), 0
        self.user_speaks, self.user_text = False, ""
        self.answer: AnswerItem | None = None
        self._begin_ms, self._played_s = 0.0, float("-inf")
        self._awaited, self._active = False, False
        self.untranscribed: set[str] = set()
        self._cut: set[str] = set()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is awaited, generated or played."""
        return self._awaited or self._active or self._playback.is_speaking or self.answer is not None

    def is_muted(self, now_s: float) -> bool:
        """Whether the microphone is off because the speakers play."""
        return not self._may_interrupt and (self._playback.is_speaking or now_s < self._played_s + _ROOM_S)

    def tick(self, now_s: float) -> None:
        """Prints an answer that has been played."""
        if self._playback.is_speaking:
            self._played_s = now_s
        if self.answer is not None and self.answer.is_done and not self._playback.has(self.answer.id):
            self._show(self.answer.text)

    def close(self) -> None:
        """Prints what is left."""
        if self.user_text:
            self._say(USER, self.user_text.strip())
        if self.answer is not None:
            self._show(self.answer.text)

    def summary(self) -> Iterator[str]:
        """The conversation in numbers."""
        turns, cuts = len(self.turns), self.interruptions
        cut = f", {cuts} interruption{'s' * (cuts != 1)}" if cuts else ""
        yield f"{turns} turn{'s' * (turns != 1)}{cut}"
        known = sorted(turn.latency_s for turn in self.turns if turn.latency_s is not None)
        if known:
            median = statistics.median(known)
            yield f"first {self.first} after {median:.2f} s (median; {known[0]:.2f} to {known[-1]:.2f} s)"
        count = self.tokens
        if count.total():
            yield f"tokens: {count['input']} in, of them {count['cached']} cached; {count['output']} out"

    def end_turn(self) -> list[Event]:
        """Ends the user's turn; interrupts while the model speaks."""
        if self.is_answering:
            return self.interrupt()
        self._end_turn(self._sent.ms)
        return [{"type": "input_audio_buffer.commit"}, {"type": "response.create"}]

    def interrupt(self) -> list[Event]:
        cancel: list[Event] = [{"type": "response.cancel"}] if self._active else []
        return cancel + self._stop()

    def take(self, event: Event, now_s: float) -> list[Event]:
        """Returns the replies."""
        kind = event["type"].removeprefix("response.")
        match kind:
            case "input_audio_buffer.speech_started":
                self.user_speaks, self._begin_ms = True, event["audio_start_ms"]
                return self._stop()
            case "input_audio_buffer.speech_stopped":
                self.user_speaks = False
                self._end_turn(event["audio_end_ms"])
            case "input_audio_buffer.committed" if self._is_transcribed:
                self.untranscribed.add(event["item_id"])
            case "created":
                self._awaited, self._active = False, True
            case "done":
                self._finish(event["response"])
            case "conversation.item.retrieved":
                self._show_cut(event["item"])
            case "error":
                self._take_error(event)
            case _ if kind.startswith("conversation.item.input_audio_transcription."):
                self._take_transcript(kind.rpartition(".")[2], event)
            case _ if kind.startswith("output_") and event.get("item_id") not in self._cut:
                self._take_output(kind, event, now_s)
        return []

    def _end_turn(self, end_ms: float) -> None:
        self.turns.append(TurnTiming(self._sent.last_word_s(self._begin_ms, end_ms)))
        self._awaited, self._begin_ms = True, end_ms

    def _stop(self) -> list[Event]:
        cuts = self._playback.stop()
        if self.answer is not None and self.answer.id not in (id for id, _ in cuts):
            if self.answer.is_done:  # and played
                self._show(self.answer.text)
            else:  # its sound has not begun
                cuts.append((self.answer.id, 0))
        self.answer = None
        self._cut.update(id for id, _ in cuts)
        self.interruptions += bool(cuts)
        return [event for cut in cuts for event in self._truncate(*cut)]

    def _truncate(self, id: str, played_ms: int) -> Iterable[Event]:
        """Truncates the item and requests the text that is left."""
        if self.first == "audio":
            yield {"type": "conversation.item.truncate", "item_id": id, "content_index": 0, "audio_end_ms": played_ms}
        yield {"type": "conversation.item.retrieve", "item_id": id}

    def _show(self, text: str) -> None:
        self._say(MODEL, text.strip())
        self.answer = None

    def _show_cut(self, item: Event) -> None:
        part = next(iter(item.get("content") or ()), {})
        text = part.get("transcript") or part.get("text") or ""
        self._say(MODEL, f"{text.strip()} (interrupted)".strip())

    def _finish(self, response: Event) -> None:
        self._active = False
        usage = response.get("usage") or {}
        cached = (usage.get("input_token_details") or {}).get("cached_tokens", 0)
        self.tokens.update(input=usage.get("input_tokens", 0), cached=cached, output=usage.get("output_tokens", 0))
        details = response.get("status_details") or {}
        if response["status"] == "failed":
            self._say(ERROR, (details.get("error") or {}).get("message") or "the answer failed")
        elif response["status"] == "incomplete":
            self._say(NOTE, f"the answer is incomplete: {details.get('reason')}")
        if self.answer is not None:
            self._playback.complete(self.answer.id)
            self.answer.is_done = True

    def _take_error(self, event: Event) -> None:
        error = event["error"]
        if (error.get("event_id") or "").startswith(MARK):
            self.read = int(error["event_id"].removeprefix(MARK))
        elif error.get("code") not in _HARMLESS:
            self._awaited = False
            if error.get("code") == _NO_TURN:
                self.turns.pop()
            self._say(ERROR, message(event))

    def _take_transcript(self, what: str, event: Event) -> None:
        if what == "delta":
            self.user_text += event.get("delta") or ""
        elif what in ("completed", "failed"):
            self.untranscribed.discard(event["item_id"])
            self.user_text = ""
            failed = f"(not written down: {(event.get('error') or {}).get('message')})"
            self._say(USER, event["transcript"].strip() if what == "completed" else failed)

    def _take_output(self, kind: str, event: Event, now_s: float) -> None:
        if kind in ("output_audio.delta", "output_audio_transcript.delta", "output_text.delta"):
            if self.answer is None or self.answer.id != event["item_id"]:
                self.answer = AnswerItem(event["item_id"])
            if kind == "output_audio.delta":
                self._playback.add(self.answer.id, base64.b64decode(event["delta"]))
            else:
                self.answer.text += event["delta"]
            if kind == f"output_{self.first}.delta":
                self._note_first(now_s)
        elif kind == "output_audio.done":
            self._playback.complete(event["item_id"])

    def _note_first(self, now_s: float) -> None:
        if self.turns and (turn := self.turns[-1]).answered_s is None:
            turn.answered_s = now_s
            if turn.latency_s is not None:
                self._say(NOTE, f"turn {len(self.turns)}: first {self.first} after {turn.latency_s:.2f} s")
