"""What a client hears of a Live session, whose sound comes in real time already."""

import base64
from collections.abc import Callable

from gateway.dialects.live.events import error_event
from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ
from gateway.pacing.pacer import Pacer
from gateway.webrtc.opus import FRAME_MS
from gateway.webrtc.session_socket import OWN_EVENT, Event

_AHEAD_MS = 40  # the gateway sends pieces of 100 ms
_ALL = "answers"  # the pacer's only item: what is interrupted was not sent by the gateway


class LiveSpeech:
    """As `CallSpeech`, for the Live API."""

    append = "session.input_audio.append"
    read_alone = ("session.input_audio.append",)
    error_event = staticmethod(error_event)

    def __init__(
        self, play: Callable[[bytes], None], tell: Callable[[Event], None], ask: Callable[[Event], None]
    ) -> None:
        self._tell = tell
        self.pacer = Pacer(lambda _, frame: play(frame), PCM_RATE_HZ, FRAME_MS, _AHEAD_MS)

    def take(self, event: Event) -> bool:
        """Whether the client gets an event of the gateway, too."""
        match event["type"]:
            case "session.output_audio.delta":
                self.pacer.add(_ALL, base64.b64decode(event["delta"]))
                return False
            case "error":
                return not str(event["error"].get("client_event_id") or "").startswith(f"{OWN_EVENT}_")
        return True

    def asked(self, event: Event) -> Event | None:
        """Drops sound that does not come from the connection's microphone."""
        return None if event.get("type") == self.append else event
