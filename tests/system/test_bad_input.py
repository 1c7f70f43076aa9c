"""Bad requests get a 4xx that names the field, and another request streams on undisturbed."""

import base64
import io
import json
import struct
import threading
import wave

import httpx
import pytest
from PIL import Image

pytestmark = pytest.mark.e2e


def data_url(kind: str, file: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(bytes(int(seconds * 16000) * 2))
    return file.getvalue()


def three_hours() -> bytes:
    """A WAV header that promises 3 hours at 8 kHz, and a second of it."""
    size_bytes = 3 * 3600 * 8000
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        size_bytes + 36,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        8000,
        8000,
        1,
        8,
        b"data",
        size_bytes,
    )
    return header + bytes(8000)


def user(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: str) -> dict:
    return user({"type": "image_url", "image_url": {"url": url}})


def audio(file: bytes) -> dict:
    return user({"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}})


SPEECH = {"modalities": ["text", "audio"]}
CASES = {
    "no messages": ({"messages": []}, 400, "messages"),
    "messages left out": ({"messages": None}, 400, "messages"),
    "unknown model": ({"model": "gpt-17"}, 404, "model"),
    "unknown parameter": ({"temprature": 1}, 400, "temprature"),
    "unknown role": ({"messages": [{"role": "usr", "content": "x"}]}, 400, "messages[0].role"),
    "unknown part": (user({"type": "smell", "smell": "x"}), 400, "messages[0].content[0]"),
    "unknown modality": ({"modalities": ["text", "smell"]}, 400, "modalities"),
    "unknown voice": ({**SPEECH, "audio": {"voice": "nobody", "format": "wav"}}, 400, "audio.voice"),
    "unknown format": ({**SPEECH, "audio": {"voice": "ethan", "format": "mp17"}}, 400, "audio.format"),
    "streamed mp3": ({**SPEECH, "audio": {"voice": "ethan", "format": "mp3"}, "stream": True}, 400, "audio.format"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens -2": ({"max_tokens": -2}, 400, "max_tokens"),
    "temperature": ({"temperature": -0.1}, 400, "temperature"),
    "top_p": ({"top_p": 1.5}, 400, "top_p"),
    "n": ({"n": 0}, 400, "n"),
    "unknown stage setting": ({"quartet": {"talker": {"speed": 2}}}, 400, "quartet.talker.speed"),
    "stage setting out of range": ({"quartet": {"talker": {"top_p": 0}}}, 400, "quartet.talker.top_p"),
    "bad schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        400,
        "response_format",
    ),
    "corrupt image": (image(data_url("image/png", png(64, 64)[:80])), 400, "messages[0].content[0]"),
    "no image": (image(data_url("image/png", b"what is this")), 400, "messages[0].content[0]"),
    "bad base64": (image("data:image/png;base64,!!!"), 400, "messages[0].content[0]"),
    "1 x 1 image": (image(data_url("image/png", png(1, 1))), 400, "messages[0].content[0]"),
    "zero-length audio": (audio(wav(0)), 400, "messages[0].content[0]"),
    "empty audio file": (audio(b""), 400, "messages[0].content[0]"),
    "3 hours of audio": (audio(three_hours()), 400, "messages[0].content[0]"),
    "private address": (image("http://127.0.0.1:9/cat.png"), 400, "messages[0].content[0]"),
    "metadata service": (image("http://169.254.169.254/latest"), 400, "messages[0].content[0]"),
    "file URL": (image("file:///etc/passwd"), 400, "messages[0].content[0]"),
    "prompt too long": ({"messages": [{"role": "user", "content": "sea " * 60_000}]}, 400, "messages"),
}


@pytest.fixture(scope="module")
def bystander(stack):
    """A request that streams speech while the others are refused; yields, then checks that it came through whole."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Go on."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 400,
        "ignore_eos": True,
        "quartet": {"talker": {"temperature": 0, "max_frames": 400}},
    }
    lines: list[str] = []

    def read() -> None:
        with stack.http.stream("POST", "/v1/chat/completions", json=body, timeout=120) as response:
            lines.extend(response.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    yield
    reader.join(120)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not [c for c in chunks if "error" in c]
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert chunks[-1]["usage"]["completion_tokens_details"]["text_tokens"] == 400


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("name", CASES)
def test_refused(stack, name):
    change, status, field = CASES[name]
    body = {"model": stack.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **change}
    response = stack.http.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(field), error
    assert error["message"]
    assert error["type"]
    assert response.headers["x-request-id"]


@pytest.mark.usefixtures("bystander")
def test_malformed_json_and_oversized_uploads(stack):
    url = "/v1/chat/completions"
    response = stack.http.post(url, content=b'{"messages": [', headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]

    def endless():
        for _ in range(1024):
            yield bytes(1024 * 1024)

    try:
        response = stack.http.post(url, content=endless(), headers={"content-type": "application/json"})
    except httpx.WriteError:  # refused so early that the rest of the upload had nowhere to go
        return
    assert response.status_code == 413
    assert response.json()["error"]["message"]
