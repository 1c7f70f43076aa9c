"""Other people's libraries converse by OpenAI's Live API, unmodified but for the base URL: three turns, in which the
model calls a function, and the user interrupts an answer. The stages follow a script, and the detector of speech is the
real one."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai.lib.live import TranscriptGrouper
from openai.types.live import ServerEvent
from pydantic import TypeAdapter

from gateway.dialects.live.handler import LiveHandler
from gateway.dialects.live.output import LiveOutput
from gateway.media.encode import encode_audio
from tests.support.clients.environments import CLIENTS, python_with, report_of
from tests.support.clients.live_client import LiveClient, connected
from tests.support.samples.espeak import spoken
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.weekly
RATE_HZ = 24_000
TURNS = {
    "first": "Please turn on the lamp.",
    "second": "Wait, tell me about the boats.",
    "third": "And what is the sea like today?",
}
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
ANSWER = [f" {word}" for word in WORDS.split()]
WHOLE = "".join(ANSWER).strip()
ANSWER_FRAMES = 100  # 8 s
RESULT = "The lamp is on."
WRITTEN = "What I said."  # of each turn of the user's
MOST_AHEAD_MS = 250


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[Running]:
    async with running() as started:
        yield started


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the user says."""
    directory = tmp_path_factory.mktemp("speech")
    for name, text in TURNS.items():
        (directory / f"{name}.wav").write_bytes(encode_audio(spoken(text, RATE_HZ), RATE_HZ, "wav"))
    return directory


class Talk:
    """What the stages make: the user's first turn is a task, for whoever has the lamp. A call has no sound."""

    def __init__(self, gateway: Running) -> None:
        self._frames = dict[str, int]()  # of sound, by request
        gateway.scripts["thinker"].replies, gateway.scripts["thinker"].ids_reusable = self._reply, False
        gateway.scripts["code2wav"].lengths = self._length

    def _reply(self, request: Any) -> tuple[str, str] | list[str]:
        made = _made(request)
        self._frames[request.request_id] = 0 if isinstance(made, tuple) else ANSWER_FRAMES
        return made

    async def _length(self, request_id: str) -> int:
        while request_id not in self._frames:
            await asyncio.sleep(0.005)
        return self._frames[request_id]


def _made(request: Any) -> tuple[str, str] | list[str]:
    texts = "\n".join(part.text for message in request.messages for part in message.content)
    if "Transcribe" in texts:
        return [WRITTEN]
    roles, tools = [message.role for message in request.messages], {tool.name for tool in request.tools}
    if "You are the backend" in texts:
        return [f">> {RESULT}"] if roles[-1] == "tool" else ("lamp", '{"on": true}')
    if roles[-1] == "tool" or roles.count("user") > 1:
        return ANSWER
    return ("lamp", '{"on": true}') if "lamp" in tools else ("delegate", "{}")


class Listener:
    """A sideband of the one session that a client opens. It measures by the session's own clock: what comes late, since
    the machine is busy, seems less ahead than it was, never more.

    Attributes:
        client: what came.
        ahead_ms: of a frame's end when it came, at most.
        after_cuts_ms: of sound that was still to be heard when the user's words cut an answer.
    """

    def __init__(self, gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gateway, self.client = gateway, LiveClient(None)  # pyright: ignore[reportArgumentType]
        self.ahead_ms, self.after_cuts_ms = 0.0, list[float]()
        cut = LiveOutput.cut

        def noted(output: LiveOutput) -> None:
            self.after_cuts_ms.append(1000 * (output.pacer.plays_until - time.monotonic()))
            cut(output)

        monkeypatch.setattr(LiveOutput, "cut", noted)

    @property
    def _handler(self) -> LiveHandler:
        (handler,) = self._gateway.app.state.live_sessions.handlers
        return handler

    async def run(self) -> None:
        """Returns when the session ends."""
        while not self._gateway.app.state.live_sessions:
            await asyncio.sleep(0.005)
        handler = self._handler
        async with connected(self._gateway, f"/v1/live/sessions/{handler.id}/attach") as self.client:
            while (event := await self.client.event())["type"] != "session.closed":
                if event["type"] == "session.output_audio.delta":
                    self.ahead_ms = max(self.ahead_ms, event["end_ms"] - handler.elapsed_s * 1000)

    @property
    def resets(self) -> list[str]:
        """Why OpenAI's own grouper of transcripts has ended turns."""
        reasons, grouper = [], TranscriptGrouper()
        grouper.on("segment.closed", lambda closed: reasons.append(closed.reason))
        for event in self.client.events:
            if event["type"].endswith("_transcript.delta"):
                grouper.push(TypeAdapter(ServerEvent).validate_python(event))
        grouper.close()
        return reasons


@pytest.mark.parametrize("delegation", ["client", "responses"])
@pytest.mark.parametrize(
    ("program", "environment"),
    [("openai_live", "openai"), ("pipecat_live", "pipecat"), ("livekit_live", "livekit")],
)
async def test_a_conversation(
    gateway: Running, speech: Path, monkeypatch: pytest.MonkeyPatch, program: str, environment: str, delegation: str
) -> None:
    Talk(gateway)
    listener = Listener(gateway, monkeypatch)
    command = [str(python_with(environment)), str(CLIENTS / f"{program}.py"), f"{gateway.url}/v1", str(speech)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listener.run())
        talk = tasks.create_task(asyncio.to_thread(report_of, *command, delegation, OPENAI_API_KEY="none"))
    report = talk.result()
    answers = _answers(gateway)
    await gateway.reset()
    assert report["errors"] == []
    assert report["calls"] == [{"on": True}]
    assert report["delegations"] == [delegation]
    assert _said(report["texts"], "user").count(WRITTEN) == 3
    heard = [f"one{rest}".strip() for rest in _said(report["texts"], "assistant").split("one")[1:]]
    assert len(heard) == 3
    assert all(WHOLE.startswith(text) for text in heard)
    assert len(heard[0]) < len(WHOLE)  # it was interrupted
    assert heard[-1] == WHOLE
    assert answers == heard  # the model's history is the client's
    assert listener.resets
    assert "timestamp_reset" not in listener.resets
    assert listener.after_cuts_ms
    assert max(listener.ahead_ms, *listener.after_cuts_ms) <= MOST_AHEAD_MS


def _said(texts: list[tuple[str, str]], role: str) -> str:
    """All that one of both has said: a client on a busy machine may see one turn as two."""
    return " ".join(text.strip() for each, text in texts if each == role)


def _answers(gateway: Running) -> list[str]:
    """What the model read of its own answers, and its last one."""
    asked = [each for each in gateway.scripts["thinker"].requests if "Transcribe" not in str(each)][-1]
    texts = ["".join(part.text for part in each.content).strip() for each in asked.messages if each.role == "assistant"]
    return [*filter(None, texts), WHOLE]
