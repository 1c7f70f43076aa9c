"""Honest clients: each asks the same at a fixed pace, and knows the right answer."""

import base64
import contextlib
import json
import threading
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import soxr
from websockets.sync.client import connect as connect_socket

from cli.chat import ask
from cli.demo import QUESTIONS, SPEECH, VOICE
from cli.http import check, connect, files

EVERY_S = 5.0  # of each kind
GIVES_UP_S = 60.0
RATE_HZ = 24_000  # of realtime's sound
HEARD, SEEN, WRITTEN = QUESTIONS[0], QUESTIONS[2], QUESTIONS[3]
GREEDY = {"temperature": 0, "max_tokens": 64}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": VOICE}}
SPEECH_OF = {"quartet": {"talker": {"max_frames": 100, "seed": 0}}}


class WrongAnswer(Exception):
    """The answer is not the right one."""


@dataclass(frozen=True)
class Asked:
    """One request. Times are monotonic seconds; `error`: why it failed."""

    at_s: float
    took_s: float
    error: str | None


@dataclass
class Honest:
    """The clients, in threads. `asked`: by kind."""

    url: str
    key: str
    asked: dict[str, list[Asked]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number, (name, kind) in enumerate(KINDS.items()):
            self.asked[name] = []
            args = (name, kind, number * EVERY_S / len(KINDS))
            self._threads.append(threading.Thread(target=self._ask, args=args, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, name: str, kind: Callable[[httpx.Client], None], begins_s: float) -> None:
        due = time.monotonic() + begins_s
        with connect(self.url, self.key) as client:
            client.timeout = GIVES_UP_S
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                began, error = time.monotonic(), None
                try:
                    kind(client)
                except Exception as failure:
                    error = f"{type(failure).__name__}: {failure}"
                self.asked[name].append(Asked(began, time.monotonic() - began, error))
                due = max(due + EVERY_S, time.monotonic())


def _expect(said: str, right: str) -> None:
    if said != right:
        raise WrongAnswer(f"{said!r}, not {right!r}")


def _written(client: httpx.Client) -> None:
    answer = ask(client, [{"role": "user", "content": WRITTEN.content}], GREEDY, lambda _: None)
    _expect(answer.text, WRITTEN.answer)


def _spoken(client: httpx.Client) -> None:
    options = GREEDY | SPOKEN | SPEECH_OF
    answer = ask(client, [{"role": "user", "content": HEARD.content}], options, lambda _: None)
    _expect(answer.text, HEARD.answer)
    if not np.frombuffer(answer.pcm, np.int16).any():
        raise WrongAnswer("silent")


def _seen(client: httpx.Client) -> None:
    _expect(ask(client, [{"role": "user", "content": SEEN.content}], GREEDY, lambda _: None).text, SEEN.answer)


def _transcription(client: httpx.Client) -> None:
    response = client.post("/v1/audio/transcriptions", data={"model": "quartet-demo"}, files=files("file", [SPEECH]))
    _expect(check(response).json()["text"], HEARD.text)


def _turn(client: httpx.Client) -> None:
    """A session of its own, of one turn."""
    url = f"ws{str(client.base_url).removeprefix('http').rstrip('/')}/v1/realtime"
    headers = {"authorization": client.headers["authorization"]}
    session = {"type": "realtime", "audio": {"input": {"turn_detection": None}, "output": {"voice": VOICE}}}
    with connect_socket(url, additional_headers=headers, open_timeout=GIVES_UP_S, max_size=None) as socket:
        for event in (
            {"type": "session.update", "session": session},
            {"type": "input_audio_buffer.append", "audio": base64.b64encode(_sound()).decode()},
            {"type": "input_audio_buffer.commit"},
            {"type": "response.create"},
        ):
            socket.send(json.dumps(event))
        while (event := json.loads(socket.recv(timeout=GIVES_UP_S)))["type"] != "response.done":
            if event["type"] == "error":
                raise WrongAnswer(event["error"]["message"])
    response: Any = event["response"]
    _expect(response["status"], "completed")
    _expect(response["output"][0]["content"][0]["transcript"], HEARD.answer)


def _sound() -> bytes:
    with contextlib.closing(wave.open(str(SPEECH))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return soxr.resample(samples, file.getframerate(), RATE_HZ).astype("<i2").tobytes()


KINDS: dict[str, Callable[[httpx.Client], None]] = {
    "written chat": _written,
    "spoken chat": _spoken,
    "picture": _seen,
    "transcription": _transcription,
    "realtime turn": _turn,
}
