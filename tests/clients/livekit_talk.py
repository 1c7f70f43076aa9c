"""A conversation by LiveKit Agents: python livekit_talk.py BASE_URL DIRECTORY. See README.md."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool, io
from livekit.plugins import openai
from microphone import RATE_HZ, Microphone


class Ear(io.AudioInput):
    """A microphone in place of a room's."""

    def __init__(self, microphone: Microphone) -> None:
        super().__init__(label="microphone")
        self._pieces = microphone.pieces()

    def __aiter__(self) -> AsyncIterator[rtc.AudioFrame]:
        return self

    async def __anext__(self) -> rtc.AudioFrame:
        piece = await anext(self._pieces)
        return rtc.AudioFrame(piece, RATE_HZ, num_channels=1, samples_per_channel=len(piece) // 2)


class Loudspeaker(io.AudioOutput):
    """Plays in real time, to nobody."""

    def __init__(self) -> None:
        super().__init__(label="loudspeaker", capabilities=io.AudioOutputCapabilities(pause=False))
        self._begun, self._length_s = 0.0, 0.0
        self._playing: asyncio.Task[None] | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._length_s:
            self._begun = time.monotonic()
            self.on_playback_started(created_at=time.time())
        self._length_s += frame.duration

    def flush(self) -> None:
        super().flush()
        if self._length_s and self._playing is None:
            self._playing = asyncio.create_task(self._play())

    async def _play(self) -> None:
        await asyncio.sleep(self._begun + self._length_s - time.monotonic())
        self._finish(interrupted=False)

    def clear_buffer(self) -> None:
        if self._playing is not None:
            self._playing.cancel()
        if self._length_s:
            self._finish(interrupted=True)

    def _finish(self, *, interrupted: bool) -> None:
        position_s = min(time.monotonic() - self._begun, self._length_s)
        self._playing, self._length_s = None, 0.0
        self.on_playback_finished(playback_position=position_s, interrupted=interrupted)


class Housekeeper(Agent):
    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(instructions="Be brief.")
        self._report = report

    @function_tool
    async def lamp(self, on: bool) -> str:
        """Turns the lamp on or off."""
        self._report["calls"].append({"on": on})
        self.realtime_llm_session.update_options(tool_choice="none")
        return "done"


class Talk:
    """Three turns: a call, whose answer is interrupted by the second turn, and a third."""

    def __init__(self, session: AgentSession, microphone: Microphone) -> None:
        self._microphone, self.done = microphone, asyncio.Event()
        self.report: dict[str, Any] = {
            "calls": [],
            "interrupted": [],
            "truncated_ms": [],
            "transcripts": [],
            "errors": [],
        }
        session.on("agent_state_changed", self._changed)
        session.on("conversation_item_added", self._said)
        session.on("user_input_transcribed", self._written)
        session.on("error", lambda event: self.report["errors"].append(str(event.error)))

    def received(self, event: dict[str, Any]) -> None:
        """What the plugin hears from the server."""
        if event["type"] == "conversation.item.truncated":
            self.report["truncated_ms"].append(event["audio_end_ms"])

    def _changed(self, event: Any) -> None:
        if event.new_state == "speaking" and not self.report["interrupted"]:
            self._microphone.say("second")

    def _said(self, event: Any) -> None:
        answers = self.report["interrupted"]
        if event.item.type == "message" and event.item.role == "assistant":
            answers.append(event.item.interrupted)
            if len(answers) == 2:
                self._microphone.say("third")
            self._look()

    def _written(self, event: Any) -> None:
        if event.is_final:
            self.report["transcripts"].append(event.transcript)
            self._look()

    def _look(self) -> None:
        if len(self.report["interrupted"]) == 3 and self.report["transcripts"]:
            self.done.set()


async def main() -> None:
    base_url, directory = sys.argv[1:]
    microphone = Microphone(Path(directory))
    model = openai.realtime.RealtimeModel(base_url=base_url, tool_choice="required")
    # By default it hears nothing in the first 3 s that it speaks.
    session = AgentSession(llm=model, aec_warmup_duration=None)
    session.input.audio, session.output.audio = Ear(microphone), Loudspeaker()
    talk = Talk(session, microphone)
    agent = Housekeeper(talk.report)
    await session.start(agent)
    agent.realtime_llm_session.on("openai_server_event_received", talk.received)
    microphone.say("first")
    await talk.done.wait()
    await session.aclose()
    print(json.dumps(talk.report))


asyncio.run(main())
