"""Questions of the world that the shipped model knows, as its API takes them, and whether it answers them rightly.

All that is drawn is held out: training never asked it, nor in these voices.
"""

import asyncio
import base64
import io
import json
import random
from typing import Any

import httpx
import numpy as np
import soundfile
import soxr

from services.demo_models import OMNI
from training.dialogue import Dialogue
from training.functions import call
from training.hearing import RATE_HZ, draw_voice, sound_of
from training.scenes import Picture
from training.world import capitals, days, draw_dialogue, repeating, spelling, sums

AT_ONCE = 16
SPEECH_HZ = 24_000
SPOKEN = {sums: 3.0, days: 2.0, capitals: 2.0, spelling: 1.0, repeating: 1.0}


def drawn(count: int, kinds: dict, seed: str) -> list[Dialogue]:
    """Dialogues of `kinds`: functions of training.world, and how often each is taken."""
    draw = random.Random(seed)
    return [draw_dialogue(draw, held_out=True, kinds=kinds) for _ in range(count)]


def recording(text: str, draw: random.Random, noise_db: float | None = None) -> bytes:
    """A WAV file of `text`, in a voice that training never heard."""
    file = io.BytesIO()
    soundfile.write(file, sound_of(text, draw_voice(draw, held_out=True), draw, noise_db)[0], RATE_HZ, format="WAV")
    return file.getvalue()


def at_the_microphone(text: str, draw: random.Random, noise_db: float) -> np.ndarray:
    """The same as it comes from a microphone: (samples,) int16 at 24 kHz."""
    samples = sound_of(text, draw_voice(draw, held_out=True), draw, noise_db)[0]
    return (soxr.resample(samples, RATE_HZ, SPEECH_HZ).clip(-1, 1) * 32767).astype(np.int16)


def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.render().save(file, "PNG")
    return file.getvalue()


def parts_of(dialogue: Dialogue, aloud: random.Random | None = None, noise_db: float | None = None) -> list[tuple]:
    """Messages up to the question that is asked: (role, parts); a part is text, or a kind and a file.

    Args:
        aloud: what voices are drawn from; None: the questions are typed.
        noise_db: how much louder the voices are than the noise with them.
    """
    messages: list[tuple] = []
    for i, turn in enumerate(dialogue.turns):
        parts: list[Any] = []
        for picture in (dialogue.scene if i == 0 else None, turn.shown):
            if picture is not None:
                parts.append(("image", png(picture)))
        parts.append(("audio", recording(turn.question, aloud, noise_db)) if aloud else turn.question)
        messages += [("user", parts), ("assistant", [turn.answer])]
    return messages[:-1]


def messages_of(dialogue: Dialogue, aloud: random.Random | None = None, noise_db: float | None = None) -> list[dict]:
    """The same in OpenAI's form."""
    return [
        {"role": role, "content": [_part(part) for part in parts]}
        for role, parts in parts_of(dialogue, aloud, noise_db)
    ]


async def with_tools(client: httpx.AsyncClient, dialogue: Dialogue) -> str:
    """What is answered where the dialogue's tools are given: text, or calls as the chat template writes them."""
    body = {"model": OMNI, "messages": messages_of(dialogue), "temperature": 0, "max_tokens": 128}
    body |= {"tools": dialogue.tools} if dialogue.tools else {}
    answer = await client.post("/v1/chat/completions", json=body)
    message = answer.raise_for_status().json()["choices"][0]["message"]
    called = [each["function"] for each in message.get("tool_calls") or ()]
    calls = [call(each["name"], json.loads(each["arguments"])) for each in called]
    return "\n".join(filter(None, [message["content"], *calls]))


def _part(part: str | tuple[str, bytes]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, file = part
    data = base64.b64encode(file).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def said(client: httpx.AsyncClient, messages: list[dict], **options: Any) -> str:
    """The answer, or the type of the error in angle brackets."""
    body = {"model": OMNI, "messages": messages, "temperature": 0, "max_tokens": 64, **options}
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return f"<{answer.json()['error']['type']}>"
    return answer.json()["choices"][0]["message"]["content"]


async def right(client: httpx.AsyncClient, dialogues: list[Dialogue], **asked: Any) -> int:
    """How many of them are answered word for word, `AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(dialogue: Dialogue) -> bool:
        async with places:
            return await said(client, messages_of(dialogue, **asked)) == dialogue.turns[-1].answer

    return sum(await asyncio.gather(*map(answer, dialogues)))
