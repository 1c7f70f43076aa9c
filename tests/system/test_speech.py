"""`/v1/audio/speech`, transcriptions and translations as users call them: OpenAI's client against real processes."""

import json
import uuid
from pathlib import Path

import numpy as np
import openai
import pytest

from quartet.v1 import talker_pb2, talker_pb2_grpc
from services.common.stream.tensors import to_torch
from tests.support.clients.speech import ENDLESS_SPEECH
from tests.support.stage.streaming import CHANNELS
from tests.support.systems.stack import until
from tests.support.systems.stages import decode

pytestmark = pytest.mark.e2e
QUESTION = Path(__file__).parents[2] / "cli" / "assets" / "question.wav"
TEXT = "The boats are out, and nobody waits for them."
BRIEF = {"max_completion_tokens": 24}
GREEDY = {"talker": {"temperature": 0, "max_frames": 24}}


@pytest.fixture(scope="module")
def client(stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=120)


async def test_speech_is_what_talker_and_code2wav_make_of_the_text(stack, client):
    speech = client.audio.speech.with_streaming_response
    options = {"extra_body": {"quartet": GREEDY}, "response_format": "pcm", "instructions": "Calmly."}
    with speech.create(model=stack.model, voice="chelsie", input=TEXT, **options) as response:
        heard = np.frombuffer(b"".join(response.iter_bytes()), "<i2")
    start = talker_pb2.SpeakStart(
        request_id=uuid.uuid4().hex,
        text=talker_pb2.SpokenText(text=TEXT, instructions="Calmly."),
        speaker="chelsie",
        sampling=talker_pb2.TalkerSampling(temperature=0, max_frames=24),
    )
    async with stack.stages_reached():
        stub = talker_pb2_grpc.TalkerServiceStub(CHANNELS.channel(stack.addresses["talker"]))
        frames = [
            to_torch(response.frames.tensor).numpy()
            async for response in stub.Speak([talker_pb2.SpeakRequest(start=start)])
            if response.HasField("frames")
        ]
        samples = await decode(stack.addresses["code2wav"], np.concatenate(frames))
    assert len(heard) == len(samples) > 0
    np.testing.assert_allclose(heard / 32768, samples, rtol=0, atol=1e-4)


def test_the_thinker_takes_no_part(stack):
    before = stack.metric("thinker", "quartet_requests_total")
    body = {"model": stack.model, "input": TEXT, "quartet": GREEDY, "stream_format": "sse"}
    response = stack.http.post("/v1/audio/speech", json=body).raise_for_status()
    *deltas, done = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert len(deltas) > 2
    assert done["usage"]["input_tokens"] > 5
    assert stack.metric("thinker", "quartet_requests_total") == before


def test_a_listener_who_leaves_frees_every_stage(stack):
    body = {"model": stack.model, "input": TEXT * 20, "response_format": "pcm", "quartet": {"talker": ENDLESS_SPEECH}}
    with stack.http.stream("POST", "/v1/audio/speech", json=body) as response:
        heard = response.iter_raw()  # kept: httpx closes the connection of an iterator that is gone
        assert next(heard)
        assert stack.in_flight()["talker"] == 1
    until(lambda: not any(stack.in_flight().values()), "all stages are free")


def test_what_is_said_is_written_down(stack, client):
    transcriptions = client.audio.transcriptions
    with QUESTION.open("rb") as file:
        whole = transcriptions.create(
            model=stack.model, file=file, response_format="verbose_json", language="en", extra_body=BRIEF
        )
    assert whole.segments
    (segment,) = whole.segments
    assert 0 <= segment.start < 0.3
    assert 1.4 < segment.end < 2.1
    assert whole.text == segment.text
    with QUESTION.open("rb") as file:
        events = list(transcriptions.create(model=stack.model, file=file, stream=True, language="en", extra_body=BRIEF))
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == whole.text
    assert 0 < events[-1].usage.output_tokens <= 24
    with QUESTION.open("rb") as file:
        assert client.audio.translations.create(model=stack.model, file=file, extra_body=BRIEF).text
