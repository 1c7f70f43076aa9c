"""Drives each stage alone by its reflection, as grpcurl does, for scripts/test_compose.py."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import grpc
from compose_load import QUESTIONS
from compose_system import STAGES, System, docker
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

FRAMES = 5
SAMPLES_PER_FRAME = 1920
QUESTION, ANSWER = next(iter(QUESTIONS.items()))
TOKENS = f"""
from services.demo_models import OMNI, resolve
from transformers import AutoTokenizer
messages = [{{"role": "user", "content": "{QUESTION}"}}]
tokenizer = AutoTokenizer.from_pretrained(resolve(OMNI))
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
print([list(prompt), tokenizer("{ANSWER}").input_ids])
"""


def alone(system: System) -> Iterator[str]:
    """Checks that the thinker answers, the talker speaks tokens, and code2wav decodes its frames."""
    messages = [{"role": "user", "content": [{"text": QUESTION}]}]
    sampling = {"temperature": 0, "maxTokens": 64}
    start = {"requestId": "alone-1", "messages": messages, "sampling": sampling}
    answers = _call(system, "thinker", "Generate", {"start": start})
    said = "".join(each.get("delta", {}).get("text", "") for each in answers)
    assert said == ANSWER, said
    yield f"thinker: {said}"

    (talker,) = system.containers("talker")
    prompt, answer = json.loads(docker("exec", talker["Id"], "python", "-c", TOKENS))
    rows = {"name": "token_ids", "tensor": _tensor([*prompt, *answer])}
    inline = {"header": {"promptPositions": len(prompt)}, "rows": [rows]}
    sampling = {"temperature": 0, "maxFrames": FRAMES}
    start = {"requestId": "alone-2", "inline": inline, "sampling": sampling}
    _, *frames, _ = _call(system, "talker", "Speak", {"start": start})
    assert len(frames) == FRAMES, frames
    codes = b"".join(base64.b64decode(frame["frames"]["tensor"]["inline"]) for frame in frames)
    yield f"talker: {FRAMES} frames of {len(codes) // 4 // FRAMES} codes"

    tensor = {"dtype": "DATA_TYPE_INT32", "shape": [FRAMES, len(codes) // 4 // FRAMES]}
    request = {"requestId": "alone-3", "codes": tensor | {"inline": base64.b64encode(codes).decode()}}
    *_, summary = _call(system, "code2wav", "Decode", request)
    samples = int(summary["summary"]["samples"])
    assert 0.9 * FRAMES < samples / SAMPLES_PER_FRAME <= FRAMES, summary
    yield f"code2wav: {samples} samples"


def _tensor(values: list[int]) -> dict[str, Any]:
    flat = b"".join(value.to_bytes(4, "little") for value in values)
    return {"dtype": "DATA_TYPE_INT32", "shape": [len(values)], "inline": base64.b64encode(flat).decode()}


def _call(system: System, stage: str, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a stage's answer as JSON. Takes the messages from reflection and imports nothing of Quartet."""
    (container,) = system.containers(stage)
    port, service = STAGES[stage]
    with grpc.insecure_channel(f"{system.address(container)}:{port}") as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        described = pool.FindServiceByName(service).FindMethodByName(method)
        message = json_format.ParseDict(request, GetMessageClass(described.input_type)())
        call = channel.stream_stream(
            f"/{service}/{method}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        return [json_format.MessageToDict(answer) for answer in call(iter([message]), timeout=60)]
