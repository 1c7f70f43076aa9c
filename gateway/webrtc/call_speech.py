"""What a client hears of a session's answers, and what becomes of an answer that it does not hear to its end."""

import base64
from collections.abc import Callable

from gateway.dialects.realtime.events import error_event, new_id, server_event
from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ
from gateway.pacing.pacer import Pacer
from gateway.webrtc.opus import FRAME_MS
from gateway.webrtc.session_socket import OWN_EVENT, Event, with_pcm

_AHEAD_MS = 40  # two frames: the event loop may be late by one


class CallSpeech:
    """Plays the sound of a realtime session's events in real time, and tells when.

    Args:
        play: sends a frame of mono PCM16 at 24 kHz.
        tell: sends an event to the client.
        ask: sends an event to the gateway.
    """

    append = "input_audio_buffer.append"  # the event with the client's sound
    read_alone = ("session.update", "output_audio_buffer.clear")  # the client's events that `asked` changes
    error_event = staticmethod(error_event)

    def __init__(
        self, play: Callable[[bytes], None], tell: Callable[[Event], None], ask: Callable[[Event], None]
    ) -> None:
        self._tell, self._ask = tell, ask
        self.pacer = Pacer(lambda _, frame: play(frame), PCM_RATE_HZ, FRAME_MS, _AHEAD_MS)
        self._interrupts = False
        self._playing = ""  # the response that is heard
        self._response_of = dict[str, str]()  # by item, of responses that may still be heard
        self._unfinished = set[str]()  # responses with sound that are not done
        self._cut = dict[str, dict[str, int]]()  # by such a response that was cut: what was heard of its items, ms

    def take(self, event: Event) -> bool:
        """Whether the client gets an event of the gateway, too. Its own events come from `tell`, in their place."""
        match event["type"]:
            case "response.output_audio.delta":
                self._add(event)
                return False
            case "response.output_audio.done":
                self.pacer.end(event["item_id"])
            case "response.done":
                self._finish(event["response"]["id"])
            case "session.created" | "session.updated":
                rules = (event["session"].get("audio") or {}).get("input", {}).get("turn_detection")
                self._interrupts = bool(rules and rules.get("interrupt_response", True))
            case "input_audio_buffer.speech_started" if self._interrupts:
                self._tell(event)
                self.clear()
                return False
            case "error":
                return not str(event["error"].get("event_id") or "").startswith(f"{OWN_EVENT}_")
        return True

    def asked(self, event: Event) -> Event | None:
        """What becomes of an event of the client, of `read_alone`. None: nothing more."""
        match event:
            case {"type": "output_audio_buffer.clear"}:
                self.clear()
                return None
            case {"type": "session.update", "session": dict() as session}:
                return {**event, "session": with_pcm(session)}
            case _:
                return event

    def clear(self) -> None:
        """Stops what is heard. The conversation keeps what was heard of it."""
        cuts = {cut.item_id: cut.played_ms for cut in self.pacer.clear()}
        for item_id, played_ms in cuts.items():
            response_id = self._response_of.pop(item_id)
            if response_id in self._unfinished:
                self._cut.setdefault(response_id, {})[item_id] = played_ms
            else:
                self._truncate(item_id, played_ms)
        for response_id in self._unfinished:  # whose further sound is not heard either
            self._cut.setdefault(response_id, {})
        if self._playing:
            self._say("cleared", self._playing)
            self._playing = ""

    def _add(self, event: Event) -> None:
        response_id, item_id = event["response_id"], event["item_id"]
        if response_id in self._cut:
            self._cut[response_id].setdefault(item_id, 0)
            return
        if response_id not in self._unfinished:
            self._unfinished.add(response_id)
            self.pacer.mark(lambda: self._start(response_id))
        self._response_of[item_id] = response_id
        self.pacer.add(item_id, base64.b64decode(event["delta"]))

    def _finish(self, response_id: str) -> None:
        if response_id not in self._unfinished:
            return
        self._unfinished.discard(response_id)
        for item_id, played_ms in self._cut.get(response_id, {}).items():
            self._truncate(item_id, played_ms)
        if self._cut.pop(response_id, None) is None:
            for item_id, of in self._response_of.items():
                if of == response_id:  # one that was cancelled has no response.output_audio.done
                    self.pacer.end(item_id)
            self.pacer.mark(lambda: self._stop(response_id))

    def _start(self, response_id: str) -> None:
        self._playing = response_id
        self._say("started", response_id)

    def _stop(self, response_id: str) -> None:
        self._playing = ""
        self._response_of = {item: of for item, of in self._response_of.items() if of != response_id}
        self._say("stopped", response_id)

    def _say(self, what: str, response_id: str) -> None:
        self._tell(server_event(f"output_audio_buffer.{what}", response_id=response_id))

    def _truncate(self, item_id: str, played_ms: int) -> None:
        cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": played_ms}
        self._ask({"type": "conversation.item.truncate", "event_id": new_id(OWN_EVENT), **cut})
