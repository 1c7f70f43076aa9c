"""Other people's libraries converse with a running system, unmodified but for the base URL: three turns, in which the
model calls a function, and the user interrupts an answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from cli.plan import PIPELINE
from gateway.media.encode import encode_audio
from tests.support.clients.environments import CLIENTS, node_with_packages, python_with, report_of
from tests.support.network.tls_front import tls_front
from tests.support.samples.espeak import spoken
from tests.support.systems.stack import IDENTITY, Access, Stack, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]
RATE_HZ = 24_000
TURNS = {
    "first": "Please turn on the lamp.",
    "second": "Wait, tell me about the boats.",
    "third": "And what is the sea like today?",
}


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("realtime")
    pipeline = _pipeline(home, tiny_checkpoint)
    with running(tiny_checkpoint, home / "run", "--pipeline", str(pipeline), access=Access(home)) as started:
        yield started


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the user says."""
    directory = tmp_path_factory.mktemp("speech")
    for name, text in TURNS.items():
        (directory / f"{name}.wav").write_bytes(encode_audio(spoken(text, RATE_HZ), RATE_HZ, "wav"))
    return directory


def _pipeline(directory: Path, checkpoint: Path) -> Path:
    """Qwen3-Omni's for a random checkpoint: its texts end after some words, as by themselves, and its speech after
    24 s, which is never said to be the end before. A free core takes two seconds for them: so the user interrupts."""
    vocabulary = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    texts = [text for text in vocabulary if text.isascii() and (text[-1].isupper() or text[:-1].startswith("<"))]
    pipeline = yaml.safe_load(PIPELINE.read_text())
    thinker = {"min_tokens": 8, "max_tokens": 64, "stop_token_ids": [vocabulary[text] for text in texts]}
    talker = {"temperature": 1, "seed": 3, "repetition_penalty": 0.01, "max_frames": 300}
    pipeline["stages"]["thinker"]["sampling"] = thinker
    pipeline["stages"]["talker"]["sampling"] = talker
    file = directory / "talk.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def _talk(stack: Stack, url: str, command: list[str], speech: Path, **environment: str) -> dict[str, Any]:
    """What the program reports of its conversation, after what is the same for all."""
    barge_ins = stack.metric("gateway", "quartet_gateway_barge_ins_total")
    cancelled = {stage: stack.cancelled(stage) for stage in ("talker", "code2wav")}
    environment = {"OPENAI_API_KEY": stack.key, "OPENAI_AGENTS_DISABLE_TRACING": "1", **environment}
    report = report_of(*command, f"{url}/v1", speech, **environment)
    assert report["errors"] == []
    ((name, on),) = report["calls"][0].items()
    assert (len(report["calls"]), name, type(on)) == (1, "on", bool)
    assert report["interrupted"] == [True, False, False]
    assert stack.metric("gateway", "quartet_gateway_barge_ins_total") == barge_ins + 1
    for stage, count in cancelled.items():
        assert stack.cancelled(stage) > count
    until(lambda: not any(stack.in_flight().values()), "nothing is left in a stage")
    return report


@pytest.mark.parametrize(
    ("program", "environment"),
    [("openai_talk", "openai"), ("agents_talk", "openai"), ("livekit_talk", "livekit"), ("pipecat_talk", "pipecat")],
)
def test_a_conversation_in_python(stack: Stack, speech: Path, program: str, environment: str) -> None:
    command = [str(python_with(environment)), str(CLIENTS / f"{program}.py")]
    report = _talk(stack, stack.url, command, speech)
    if program != "pipecat_talk":  # it does not tell
        assert report["truncated_ms"]
    if program != "openai_talk":  # the others ask for transcripts by default
        assert report["transcripts"]


@pytest.mark.parametrize("program", ["openai_talk", "agents_talk"])
def test_a_conversation_in_node(stack: Stack, speech: Path, tmp_path: Path, program: str) -> None:
    """OpenAI's own library speaks TLS only."""
    assert stack.access
    command = [node_with_packages(tmp_path), str(tmp_path / f"{program}.mjs")]
    home = stack.access.certificates / IDENTITY
    port = int(stack.url.rpartition(":")[2])
    with tls_front(port, home) as secure:
        url = f"https://127.0.0.1:{secure}"
        report = _talk(stack, url, command, speech, NODE_EXTRA_CA_CERTS=str(home / "ca.crt"))
    assert report["truncated_ms"]
