"""A conversation by the OpenAI Agents SDK: python agents_talk.py BASE_URL DIRECTORY. See README.md."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeModelSendSessionUpdate, RealtimeRunner, RealtimeSession
from microphone import Microphone


class Talk:
    """Three turns: a call, whose answer is interrupted by the second turn, and a third."""

    def __init__(self, microphone: Microphone) -> None:
        self._microphone, self._session = microphone, None
        self._heard, self._interrupted = "", set()
        self.report: dict[str, Any] = {
            "calls": [],
            "interrupted": [],
            "truncated_ms": [],
            "transcripts": [],
            "errors": [],
        }

        @function_tool
        async def lamp(on: bool) -> str:
            """Turns the lamp on or off."""
            self.report["calls"].append({"on": on})
            assert self._session is not None
            await self._session.model.send_event(RealtimeModelSendSessionUpdate({"tool_choice": "none"}))
            return "done"

        self.agent = RealtimeAgent(name="housekeeper", instructions="Be brief.", tools=[lamp])

    async def run(self, session: RealtimeSession) -> None:
        """Returns when the third answer is complete, and one of the user's turns is written down."""
        self._session = session
        listening = asyncio.create_task(self._listen(session))
        self._microphone.say("first")
        async for event in session:
            self._take(event)
            if len(self.report["interrupted"]) == 3 and self.report["transcripts"]:
                break
        listening.cancel()

    async def _listen(self, session: RealtimeSession) -> None:
        async for piece in self._microphone.pieces():
            await session.send_audio(piece)

    def _take(self, event: Any) -> None:
        answers = self.report["interrupted"]
        match event.type:
            case "audio" if not self._heard:
                self._heard = event.item_id
                self._microphone.say("second")
            case "audio_interrupted":
                self._interrupted.add(event.item_id)
            case "audio_end":
                answers.append(event.item_id in self._interrupted)
                if len(answers) == 2:
                    self._microphone.say("third")
            case "error":
                self.report["errors"].append(str(event.error))
            case "raw_model_event":
                self._take_raw(event.data)

    def _take_raw(self, event: Any) -> None:
        """What the model's layer says."""
        if event.type == "input_audio_transcription_completed":
            self.report["transcripts"].append(event.transcript)
        elif event.type == "raw_server_event" and event.data["type"] == "conversation.item.truncated":
            self.report["truncated_ms"].append(event.data["audio_end_ms"])


async def main() -> None:
    base_url, directory = sys.argv[1:]
    talk = Talk(Microphone(Path(directory)))
    url = f"{base_url.replace('http', 'ws', 1)}/realtime?model=gpt-realtime"
    runner = RealtimeRunner(talk.agent, config={"model_settings": {"tool_choice": "required"}})
    async with await runner.run(model_config={"url": url}) as session:
        await talk.run(session)
    print(json.dumps(talk.report))


asyncio.run(main())
