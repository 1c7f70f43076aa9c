"""A conversation by OpenAI's SDK: python openai_talk.py BASE_URL DIRECTORY. See README.md."""

import asyncio
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

from microphone import RATE_HZ, Microphone
from openai import AsyncOpenAI

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
    """Three turns: a call, whose answer is interrupted by the second turn, and a third."""

    def __init__(self, connection: Any, microphone: Microphone) -> None:
        self._connection, self._microphone = connection, microphone
        self._playing: tuple[str, float] | None = None  # the item that is heard, and since when
        self._received_s = 0.0
        self.report: dict[str, Any] = {"calls": [], "interrupted": [], "truncated_ms": [], "errors": []}

    async def run(self) -> None:
        """Returns when the third answer is complete."""
        session = {"type": "realtime", "instructions": "Be brief.", "tools": [LAMP], "tool_choice": "required"}
        await self._connection.session.update(session=session)
        listening = asyncio.create_task(self._listen())
        self._microphone.say("first")
        async for event in self._connection:
            await self._take(event)
            if len(self.report["interrupted"]) == 3:
                break
        listening.cancel()

    async def _listen(self) -> None:
        async for piece in self._microphone.pieces():
            await self._connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())

    async def _take(self, event: Any) -> None:
        match event.type:
            case "response.output_audio.delta":
                if self._playing is None:
                    self._playing, self._received_s = (event.item_id, time.monotonic()), 0.0
                    if not self.report["interrupted"]:
                        self._microphone.say("second")
                self._received_s += len(base64.b64decode(event.delta)) / 2 / RATE_HZ
            case "input_audio_buffer.speech_started":
                await self._stop_playing()
            case "conversation.item.truncated":
                self.report["truncated_ms"].append(event.audio_end_ms)
            case "response.done":
                await self._done(event.response)
            case "error":
                self.report["errors"].append(event.error.message)

    async def _stop_playing(self) -> None:
        """The user has heard as much as there was time for."""
        if self._playing is not None:
            item_id, since = self._playing
            self._playing = None
            heard_ms = round(min(time.monotonic() - since, self._received_s) * 1000)
            cut = {"item_id": item_id, "content_index": 0, "audio_end_ms": heard_ms}
            await self._connection.conversation.item.truncate(**cut)

    async def _done(self, response: Any) -> None:
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            self.report["calls"].append(json.loads(call.arguments))
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
            await self._connection.conversation.item.create(item=output)
        if calls:
            await self._connection.session.update(session={"type": "realtime", "tool_choice": "none"})
            await self._connection.response.create()
            return
        self.report["interrupted"].append(response.status_details.reason == "turn_detected")
        if len(self.report["interrupted"]) == 2:
            self._playing = None  # in no time
            self._microphone.say("third")


async def main() -> None:
    base_url, directory = sys.argv[1:]
    client = AsyncOpenAI(base_url=base_url)
    async with client.realtime.connect(model="gpt-realtime") as connection:
        talk = Talk(connection, Microphone(Path(directory)))
        await talk.run()
    print(json.dumps(talk.report))


asyncio.run(main())
