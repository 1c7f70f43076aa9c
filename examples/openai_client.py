"""OpenAI's client against a gateway: the answer's text as it comes, then its speech in answer.wav.

quartet up
python examples/openai_client.py "Which day comes after Monday?"
"""

import base64
import os
import sys
import wave

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("QUARTET_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].to_dict()  # its member `quartet` says what the model takes and makes
stream = client.chat.completions.create(
    model=str(model["id"]),
    messages=[{"role": "user", "content": sys.argv[1]}],
    modalities=["text", "audio"],
    audio={"voice": model["quartet"]["voices"][0], "format": "pcm16"},  # pyright: ignore
    stream=True,
)
with wave.open("answer.wav", "wb") as file:
    file.setparams((1, 2, model["quartet"]["sample_rate_hz"], 0, "NONE", None))  # pyright: ignore
    for chunk in stream:
        delta = chunk.choices[0].delta.to_dict()
        print(delta.get("content") or "", end="", flush=True)
        file.writeframes(base64.b64decode((delta.get("audio") or {}).get("data") or ""))  # pyright: ignore
print()
