"""A conversation by OpenAI's SDK with the Live API: python openai_live.py BASE_URL DIRECTORY DELEGATION. See
README.md."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

from microphone import Microphone
from openai import AsyncOpenAI
from openai.lib.live import TranscriptGrouper
from three_turns import ThreeTurns

LAMP = {
    "type": "function",
    "name": "lamp",
    "description": "Turns the lamp on or off.",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


class Talk:
    def __init__(self, connection: Any, microphone: Microphone) -> None:
        self._connection, self._microphone = connection, microphone
        self.turns, self._grouper = ThreeTurns(microphone), TranscriptGrouper()
        self._calls = list[dict[str, Any]]()  # of the response that goes on
        self.report: dict[str, Any] = {"calls": [], "delegations": [], "texts": [], "ends": [], "errors": []}
        self._grouper.on("segment.closed", self._said)

    async def run(self, delegation: dict[str, Any]) -> None:
        session = {"model": "gpt-live-1", "instructions": "Be brief.", "delegation": delegation}
        await self._connection.session.start(session=session)
        listening = None
        talking = asyncio.create_task(self.turns.run())
        async for event in self._connection:
            self._grouper.push(event)
            if event.type == "session.started":
                listening = asyncio.create_task(self._listen())
                talking.add_done_callback(lambda _: asyncio.create_task(self._connection.session.close()))
            elif event.type == "session.closed":
                break
            await self._take(event)
        if listening is not None:
            listening.cancel()
        await talking

    async def _listen(self) -> None:
        async for piece in self._microphone.pieces():
            await self._connection.session.input_audio.append(audio=base64.b64encode(piece).decode())

    async def _take(self, event: Any) -> None:
        match event.type:
            case "session.output_audio.delta":
                self.turns.heard(base64.b64decode(event.delta))
            case "session.input_transcript.delta":
                self.turns.written()
            case "session.delegation.created":
                await self._delegated(event.delegation)
            case "response.event":
                await self._respond(event.event)
            case "error":
                self.report["errors"].append(event.error.message)

    async def _delegated(self, delegation: Any) -> None:
        self.report["delegations"].append(delegation.target)
        if delegation.target == "client":
            self.report["calls"].append({"on": True})
            await self._connection.session.commentary.append(content="done", delegation_id=delegation.id)

    async def _respond(self, event: dict[str, Any]) -> None:
        """Takes an event of the model that functions belong to."""
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            self._calls.append(event["item"])
        elif event["type"] == "response.completed" and self._calls:
            calls, self._calls = self._calls, []
            for call in calls:
                self.report["calls"].append(json.loads(call["arguments"]))
                output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
                await self._connection.response.item.create(item=output)
            await self._connection.response.create()

    def _said(self, closed: Any) -> None:
        self.report["texts"].append((closed.segment.speaker, closed.segment.text))
        self.report["ends"].append(closed.reason)


async def main() -> None:
    base_url, directory, kind = sys.argv[1:]
    client = AsyncOpenAI(base_url=base_url)
    responses = {"type": "responses", "responses": {"model": "gpt-5.6-luna", "tools": [LAMP]}}
    async with client.live.connect() as connection:
        talk = Talk(connection, Microphone(Path(directory)))
        await talk.run({"type": "client"} if kind == "client" else responses)
    print(json.dumps({**talk.report, "sound_s": talk.turns.sound_s, "ahead_ms": talk.turns.ahead_ms}))


asyncio.run(main())
