"""Speech and transcriptions by LiveKit Agents: python livekit_speech.py BASE_URL TEXT. See README.md."""

import asyncio
import json
import sys
from typing import Any

from livekit.plugins import openai


async def main() -> None:
    base_url, text = sys.argv[1:]
    speaker = openai.TTS(base_url=base_url)
    report: dict[str, Any] = {"transcripts": []}
    async with speaker.synthesize(text) as spoken:
        frames = [event.frame async for event in spoken]
    report["spoken_s"] = sum(frame.duration for frame in frames)
    for listener in (
        openai.STT(base_url=base_url),
        openai.STT(base_url=base_url, model="whisper-1"),
        openai.STT(base_url=base_url, model="gpt-transcribe", keywords=["boat"]),
    ):
        event = await listener.recognize(frames)
        report["transcripts"].append(event.alternatives[0].text)
    print(json.dumps(report))


asyncio.run(main())
