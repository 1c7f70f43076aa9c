"""Speech after token ids, before real stages: codes and sound are those of the same chat, by HTTP and by gRPC."""

import base64
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.samples.media import png
from tests.support.systems.stack import Stack, until
from tests.system.test_services_alone import curl, tensor

pytestmark = pytest.mark.e2e

PATH = "/inference/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 8}
FRAMES = 10
SPOKEN = {"voice": "ethan", "sampling_params": {"seed": 7, "max_frames": FRAMES}}
PICTURE = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
}


def asked(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat_sound(stack: Stack, content: Any) -> bytes:
    """What a chat says, PCM16."""
    answer = asked(
        stack,
        "/v1/chat/completions",
        model=stack.model,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": SPOKEN["voice"], "format": "pcm16"},
        quartet={"talker": SPOKEN["sampling_params"]},
        **GREEDY,
    )
    return base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])


def spoken(stack: Stack, token_ids: list[int], **members: Any) -> dict[str, Any]:
    """The speech of one answer, with its sound."""
    speech = SPOKEN | {"audio": True, "format": "pcm16"}
    body = asked(stack, PATH, token_ids=token_ids, sampling_params=GREEDY, speech=speech, **members)
    assert body["speech"]["code_groups"] == len(body["choices"][0]["speech"]["codes"][0])
    assert body["speech"]["frames_per_second"] == 12.5
    return body["choices"][0]["speech"]


def same(ours: bytes, theirs: bytes) -> bool:
    """Whether two sounds are one, PCM16: the last bit depends on how the frames came together."""
    a, b = (np.frombuffer(each, "<i2").astype(int) for each in (ours, theirs))
    return a.shape == b.shape and bool((np.abs(a - b) <= 1).all())


def frames_of(responses: list[dict[str, Any]]) -> list[list[int]]:
    found: list[list[int]] = []
    for response in responses:
        if "frames" in response:
            codes = response["frames"]["tensor"]
            shape = [int(size) for size in codes["shape"]]
            found += np.frombuffer(base64.b64decode(codes["inline"]), "<i4").reshape(shape).tolist()
    return found


def test_codes_are_those_of_the_same_chat_and_their_sound_is_what_they_decode_to(
    stack: Stack, prompt_ids: list[int]
) -> None:
    speech = spoken(stack, prompt_ids)
    heard = base64.b64decode(speech["audio"]["data"])
    assert same(heard, chat_sound(stack, "What is the sea?"))
    assert (len(speech["codes"]), speech["finish_reason"], speech["seed"]) == (FRAMES, "length", 7)
    decode = {"requestId": uuid.uuid4().hex, "codes": tensor(speech["codes"]), "sampleFormat": "SAMPLE_FORMAT_PCM16"}
    *chunks, _ = curl(stack, "code2wav", "quartet.v1.Code2WavService/Decode", decode)
    decoded = b"".join(base64.b64decode(chunk["audio"]["samples"]["inline"]) for chunk in chunks)
    assert same(heard, decoded)

    body = {"token_ids": prompt_ids, "sampling_params": GREEDY, "speech": SPOKEN, "stream": True}
    *events, done = stack.http.post(PATH, json=body).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0].get("speech", {}) for event in events]
    assert [codes for piece in pieces for codes in piece.get("codes", ())] == speech["codes"]
    assert not any("audio" in piece for piece in pieces)


def test_codes_hear_of_a_picture_as_in_a_chat(stack: Stack, prompt_ids: list[int]) -> None:
    opened = asked(stack, "/tokenize", prompt="<|vision_start|><|image_pad|><|vision_end|>")["tokens"]
    role = asked(stack, "/tokenize", prompt="<|im_start|>user\n")["tokens"]
    with_picture = [*role, *opened, *prompt_ids[len(role) :]]
    speech = spoken(stack, with_picture, content_parts=[PICTURE])
    content = [PICTURE, {"type": "text", "text": "What is the sea?"}]
    assert same(base64.b64decode(speech["audio"]["data"]), chat_sound(stack, content))
    assert speech["codes"] != spoken(stack, prompt_ids)["codes"]


def test_by_grpc_a_talker_reads_what_follows_token_ids(stack: Stack, prompt_ids: list[int]) -> None:
    stream_id = uuid.uuid4().hex
    sampling = {"temperature": 0, "maxTokens": GREEDY["max_tokens"]}
    generate = {
        "requestId": stream_id,
        "prompt": {"tokenIds": {"ids": prompt_ids}},
        "sampling": sampling,
        "outputStreamId": stream_id,
    }
    speak = {
        "requestId": stream_id,
        "source": {"address": stack.addresses["thinker"], "streamId": stream_id},
        "speaker": SPOKEN["voice"],
        "sampling": {"seed": "7", "maxFrames": FRAMES},
    }
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(curl, stack, "thinker", "quartet.v1.ThinkerService/Generate", {"start": generate})
        speaking = pool.submit(curl, stack, "talker", "quartet.v1.TalkerService/Speak", {"start": speak})
        _, *_, written = writing.result()
        said = speaking.result()
    assert written["summary"]["completionTokens"] == GREEDY["max_tokens"]
    assert frames_of(said) == spoken(stack, prompt_ids)["codes"]


def test_a_rollout_is_given_up_in_every_stage(stack: Stack, prompt_ids: list[int]) -> None:
    sampling = {"temperature": 0, "max_tokens": 2000, "ignore_eos": True}
    speech = {"audio": True, "sampling_params": {"max_frames": 2000}}
    body = {"token_ids": prompt_ids, "sampling_params": sampling, "speech": speech, "stream": True}
    until(lambda: not any(stack.in_flight().values()), "nothing else runs")
    with stack.http.stream("POST", PATH, json=body | {"request_id": "endless"}) as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        next(event for event in events if event["choices"][0].get("speech", {}).get("codes"))
        assert asked(stack, "/inference/v1/abort_requests", request_ids=["endless"]) == {}
        *_, last = events
    assert last["choices"][0]["finish_reason"] == last["choices"][0]["speech"]["finish_reason"] == "abort"
    with stack.http.stream("POST", PATH, json=body) as response:
        next(line for line in response.iter_lines() if '"codes"' in line)
    until(lambda: not any(stack.in_flight().values()), "no stage works on what nobody reads")


def test_a_prompt_without_an_answers_turn_is_refused(stack: Stack) -> None:
    token_ids = asked(stack, "/tokenize", prompt="The sea")["tokens"]
    refused = stack.http.post(PATH, json={"token_ids": token_ids, "sampling_params": GREEDY, "speech": SPOKEN})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "token_ids")
    assert "assistant turn" in error["message"]
    assert asked(stack, PATH, token_ids=token_ids, sampling_params=GREEDY)["choices"][0]["finish_reason"] == "length"
