"""Each service driven alone, as with grpcurl: found and called through reflection, without our stubs.

`buf curl` stands in for grpcurl: it reads the schema from the server's reflection service.
"""

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.systems.stack import IDENTITY, Stack

pytestmark = pytest.mark.e2e

BUF = Path(sys.executable).parent / "buf"


def curl(stack: Stack, stage: str, method: str, *messages: dict) -> list[dict]:
    """Calls `method` with `messages`; what came back, message by message."""
    assert stack.access
    home = stack.access.certificates / IDENTITY
    identity = ["--cacert", home / "ca.crt", "--cert", home / "tls.crt", "--key", home / "tls.key"]
    url = f"https://{stack.addresses[stage]}/{method}"
    command = [BUF, "curl", *identity, "--protocol", "grpc", "-d", "@-", url]
    stdin = "\n".join(map(json.dumps, messages))
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        message, end = decoder.raw_decode(rest)
        found.append(message)
        rest = rest[end:].lstrip()
    return found


def tensor(codes: list[list[int]]) -> dict:
    flat = b"".join(code.to_bytes(4, "little") for row in codes for code in row)
    shape = [str(len(codes)), str(len(codes[0]))]
    return {"dtype": "DATA_TYPE_INT32", "shape": shape, "inline": base64.b64encode(flat).decode()}


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_health_and_info(stack, stage):
    service = {"thinker": "ThinkerService", "talker": "TalkerService", "code2wav": "Code2WavService"}[stage]
    for name in ("", f"quartet.v1.{service}"):
        (health,) = curl(stack, stage, "grpc.health.v1.Health/Check", {"service": name})
        assert health["status"] == "SERVING"
    (info,) = curl(stack, stage, "quartet.v1.ServerInfoService/GetServerInfo", {})
    assert info["stage"] == stage
    assert stage in info


def test_thinker(stack):
    start = {
        "requestId": "alone-1",
        "messages": [{"role": "user", "content": [{"text": "What is the sea?"}]}],
        "sampling": {"temperature": 0, "maxTokens": 6},
    }
    prompt, *deltas, summary = curl(stack, "thinker", "quartet.v1.ThinkerService/Generate", {"start": start})
    assert prompt["prompt"]["promptTokens"] > 6
    assert sum(len(d["delta"]["tokenIds"]) for d in deltas if d["delta"].get("tokenIds")) == 6
    assert summary["summary"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert summary["summary"]["timings"]["totalMs"] > 0


def test_talker_and_code2wav(stack, prompt_ids):
    ids = [*prompt_ids, 5, 6, 7]
    rows = {"name": "token_ids", "tensor": {**tensor([[i] for i in ids]), "shape": [str(len(ids))]}}
    request = {
        "requestId": "alone-2",
        "inline": {"header": {"promptPositions": str(len(prompt_ids))}, "rows": [rows]},
        "sampling": {"temperature": 0, "maxFrames": 5},
    }
    started, *frames, summary = curl(stack, "talker", "quartet.v1.TalkerService/Speak", {"start": request})
    assert started["started"]["speaker"]
    tensors = [each["frames"]["tensor"] for each in frames]  # frames that are ready together leave together
    assert sum(int(each["shape"][0]) for each in tensors) == summary["summary"]["frames"] == 5
    (info,) = curl(stack, "code2wav", "quartet.v1.ServerInfoService/GetServerInfo", {})
    codes = b"".join(base64.b64decode(each["inline"]) for each in tensors)
    groups = info["code2wav"]["numCodeGroups"]
    assert len(codes) == 5 * groups * 4
    body = {
        "dtype": "DATA_TYPE_INT32",
        "shape": ["5", str(groups)],
        "inline": base64.b64encode(codes).decode(),
    }
    *audio, summary = curl(
        stack,
        "code2wav",
        "quartet.v1.Code2WavService/Decode",
        {"requestId": "alone-3", "codes": body, "sampleFormat": "SAMPLE_FORMAT_PCM16"},
    )
    samples = sum(len(base64.b64decode(chunk["audio"]["samples"]["inline"])) // 2 for chunk in audio)
    facts = info["code2wav"]
    assert samples == int(summary["summary"]["samples"]) == 5 * facts["samplesPerFrame"] - facts["trimmedSamples"]


def test_a_text_is_spoken_as_the_document_tells_to(stack):
    document = (Path(__file__).parents[2] / "docs" / "services.md").read_text()
    (typed,) = re.findall(r"TalkerService/Speak <<< '(.*?)'", document, re.DOTALL)
    messages = [json.loads(line) for line in typed.strip().splitlines()]
    assert len(messages) > 1  # a stream of them
    started, *frames, summary = curl(stack, "talker", "quartet.v1.TalkerService/Speak", *messages)
    assert "started" in started
    most = messages[0]["start"]["sampling"]["max_frames"]
    assert 0 < sum(int(each["frames"]["tensor"]["shape"][0]) for each in frames) == summary["summary"]["frames"] <= most


@pytest.mark.parametrize(
    ("stage", "method", "request_", "field"),
    [
        ("thinker", "ThinkerService/Generate", {"start": {"requestId": "bad-1"}}, "messages"),
        ("talker", "TalkerService/Speak", {"start": {"requestId": "bad-2"}}, "input"),
        (
            "talker",
            "TalkerService/Speak",
            {"start": {"requestId": "bad-3", "inline": {}, "speaker": "nobody"}},
            "speaker",
        ),
        ("talker", "TalkerService/Speak", {"text": "before its start"}, "start"),
        ("code2wav", "Code2WavService/Decode", {"requestId": "bad-4", "codes": tensor([[1, 2, 3]])}, "codes"),
        ("code2wav", "Code2WavService/Decode", {"requestId": "", "codes": tensor([[1, 2, 3]])}, "request_id"),
    ],
)
def test_bad_requests_name_their_field(stack, stage, method, request_, field):
    with pytest.raises(RuntimeError) as refused:
        curl(stack, stage, f"quartet.v1.{method}", request_)
    error = json.loads(str(refused.value))
    assert error["code"] == "invalid_argument"
    assert field in error["message"]
