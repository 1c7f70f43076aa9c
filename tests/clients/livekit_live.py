"""A conversation by LiveKit Agents with the Live API: python livekit_live.py BASE_URL DIRECTORY DELEGATION. See
README.md."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins.openai.realtime import GPTLiveModel
from livekit_sound import Ear, Loudspeaker
from microphone import Microphone
from three_turns import ThreeTurns


class Housekeeper(Agent):
    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(instructions="Be brief.")
        self._report = report

    @function_tool
    async def lamp(self, on: bool) -> str:
        """Turns the lamp on or off."""
        self._report["calls"].append({"on": on})
        return "done"


async def main() -> None:
    base_url, directory, kind = sys.argv[1:]
    microphone = Microphone(Path(directory))
    turns = ThreeTurns(microphone)
    report: dict[str, Any] = {"calls": [], "delegations": [], "errors": []}
    started = asyncio.Event()

    def received(event: dict[str, Any]) -> None:
        """What the plugin hears from the server."""
        if event["type"] == "session.started":
            started.set()
        elif event["type"] == "session.input_transcript.delta":
            turns.written()
        elif event["type"] == "session.output_audio.delta":
            turns.heard(base64.b64decode(event["delta"]))
        elif event["type"] == "session.delegation.created":
            report["delegations"].append(event["delegation"]["target"])

    model = GPTLiveModel(base_url=base_url, delegation=kind)
    session = AgentSession(llm=model, aec_warmup_duration=None)
    session.input.audio, session.output.audio = Ear(microphone), Loudspeaker()
    session.on("error", lambda event: report["errors"].append(str(event.error)))
    agent = Agent(instructions="Be brief.") if kind == "client" else Housekeeper(report)
    await session.start(agent)
    live: Any = agent.duplex_session

    def delegated(task: Any) -> None:
        """The application does what the model asks for, which it reads in the conversation."""
        report["calls"].append({"on": True})
        live.append_commentary("done", delegation_id=task.id)

    live.on("openai_server_event_received", received)
    live.on("delegation_created", delegated)
    await started.wait()
    await turns.run()
    await session.aclose()
    said = [item for item in session.history.items if item.type == "message" and item.role in ("user", "assistant")]
    texts = [(item.role, item.text_content) for item in said]
    print(json.dumps({**report, "texts": texts, "sound_s": turns.sound_s, "ahead_ms": turns.ahead_ms}))


asyncio.run(main())
