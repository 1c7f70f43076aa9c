"""Speaks what any OpenAI-compatible model writes, while it writes it; the speech is in answer.wav.

quartet up
LLM_URL=http://127.0.0.1:8000 VOICE=ben python examples/speak_an_llm.py "Which day comes after Monday?"

Here Quartet's own small model writes. LLM_URL may be that of any other; `quartet up --pipeline speech --model MODEL` is
then enough. VOICE is one of those that `quartet voice list` shows; left out it is the model's first.
"""

import json
import os
import sys
import threading

import httpx
from openai import OpenAI
from websockets.sync.client import connect

quartet = os.environ.get("QUARTET_URL", "http://127.0.0.1:8000")
config = {"type": "session.config", "response_format": "wav"}
config["model"] = httpx.get(f"{quartet}/v1/models").json()["data"][0]["id"]
if voice := os.environ.get("VOICE"):
    config["voice"] = voice
llm = OpenAI(base_url=os.environ["LLM_URL"] + "/v1", api_key=os.environ.get("LLM_KEY", "none"))

with connect(f"ws{quartet.removeprefix('http')}/v1/audio/speech/stream") as socket, open("answer.wav", "wb") as file:
    socket.send(json.dumps(config))

    def write() -> None:
        question = sys.argv[1]
        messages = [{"role": "user", "content": question}]
        model = llm.models.list().data[0].id
        for chunk in llm.chat.completions.create(model=model, messages=messages, stream=True):  # pyright: ignore
            if text := chunk.choices and chunk.choices[0].delta.content:
                print(text, end="", flush=True)
                socket.send(json.dumps({"type": "input.text", "text": text}))
        socket.send(json.dumps({"type": "input.done"}))

    threading.Thread(target=write, daemon=True).start()
    for message in socket:
        if isinstance(message, bytes):
            file.write(message)
        elif json.loads(message)["type"] == "error":
            sys.exit(message)
print()
