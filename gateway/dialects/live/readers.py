"""Who reads a Live session's events: its client, and the sidebands that have attached."""

from typing import Any

import pybase64

from gateway.dialects.realtime.output.outbox import Outbox

MAX_SIDEBANDS = 8


class Readers:
    def __init__(self) -> None:
        self.client = Outbox()
        self.sidebands = list[Outbox]()

    def put(self, event: dict[str, Any]) -> None:
        for outbox in (self.client, *self.sidebands):
            outbox.put(event)

    def put_sound(self, data: bytes, begin_ms: int, end_ms: int) -> None:
        """Sound for the client's loudspeaker. Sidebands learn its times."""
        event = {"type": "session.output_audio.delta", "delta": pybase64.b64encode_as_string(data)}
        self.client.put(event)
        for outbox in self.sidebands:
            outbox.put({**event, "start_ms": begin_ms, "end_ms": end_ms})

    def put_heard(self, pcm16: bytes) -> None:
        """The user's sound, for sidebands: mono at 24 kHz."""
        event = {"type": "session.input_audio.append", "audio": pybase64.b64encode_as_string(pcm16)}
        for outbox in self.sidebands:
            outbox.put(event)

    def finish(self) -> None:
        """Nothing more comes."""
        for outbox in (self.client, *self.sidebands):
            outbox.finish()
