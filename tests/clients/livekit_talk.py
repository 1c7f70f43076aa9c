"""A conversation by LiveKit Agents: python livekit_talk.py BASE_URL DIRECTORY. See README.md."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins import openai
from livekit_sound import Ear, Loudspeaker
from microphone import Microphone


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
