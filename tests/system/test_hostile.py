"""Whoever reaches a stage's port can send it anything. The stage answers each with a status that says so, takes little
memory for it, and serves others meanwhile."""

import asyncio
from typing import Any

import pytest

from quartet.v1 import code2wav_pb2, stream_pb2, talker_pb2, tensor_pb2
from services.common.rpc.channels import MAX_CALLS, MAX_MESSAGE_BYTES
from tests.hostile.calls import answer, rise
from tests.hostile.messages import at, first_paths, methods
from tests.hostile.stages import MAX_RISE_MIB, attacked, bystander, channel_to
from tests.support.systems.stack import Stack

pytestmark = pytest.mark.e2e

STAGES = ("thinker", "talker", "code2wav")


def tensor(**fields: Any) -> tensor_pb2.Tensor:
    """One of (1, 16) int32, but for `fields`."""
    whole: dict[str, Any] = {"dtype": tensor_pb2.DATA_TYPE_INT32, "shape": [1, 16]}
    payload = {} if {"shared_memory", "ucx"} & set(fields) else {"inline": bytes(64)}
    return tensor_pb2.Tensor(**{**whole, **payload, **fields})


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
async def test_no_field_of_a_request_is_more_than_a_stage_can_refuse(stack: Stack, stage: str):
    await attacked(stack, stage, slice(None))


@pytest.mark.parametrize("stage", STAGES)
async def test_some_fields_are_no_more_than_a_stage_can_refuse(stack: Stack, stage: str):
    await attacked(stack, stage, slice(1, None, 17))


async def test_a_message_is_counted_before_it_is_read(stack: Stack):
    """16 MiB of empty messages would be some 700 MiB."""
    name, start = "quartet.v1.ThinkerService/Generate", b"\x12\x00" * 7_900_000
    path = first_paths(methods()[name].input_type)["quartet.v1.GenerateStart.messages"]
    with rise(stack.pid("thinker")) as cost:
        async with channel_to(stack, "thinker") as channel, bystander(stack, "thinker"):
            status, text = await answer(channel, name, [at(path, start)])
            assert (status, "more than" in text) == ("INVALID_ARGUMENT", True)
            status, _ = await answer(channel, name, [bytes(MAX_MESSAGE_BYTES + 1)])
            assert status == "RESOURCE_EXHAUSTED"
    assert cost.mib < MAX_RISE_MIB


async def test_thousands_of_calls_of_one_peer_leave_others_their_places(stack: Stack):
    name = "quartet.v1.ThinkerService/Generate"
    with rise(stack.pid("thinker")) as cost:
        async with channel_to(stack, "thinker") as channel:
            waiting = [channel.stream_stream(f"/{name}")() for _ in range(2 * MAX_CALLS)]
            async with bystander(stack, "thinker"):
                await asyncio.sleep(1)
            for call in waiting:
                call.cancel()
    assert cost.mib < MAX_RISE_MIB
    async with bystander(stack, "thinker"):
        pass


TENSORS: dict[str, tuple[tensor_pb2.Tensor, str]] = {
    "a shape that is negative": (tensor(shape=[-1, 16]), "shape"),
    "a shape that is larger": (tensor(shape=[2**40, 16]), "inline"),
    "a shape that overflows": (tensor(shape=[2**62, 2**62, 16]), "inline"),
    "a shape that overflows, of nothing": (tensor(shape=[2**62, 2**62, 0], inline=b""), "shape"),
    "many dimensions": (tensor(shape=[1] * 100_000), "dimensions"),
    "no type": (tensor(dtype=0), "dtype"),
    "an unknown type": (tensor(dtype=99), "dtype"),
    "floats": (tensor(dtype=1), ""),
    "an arena": (
        tensor(shared_memory=tensor_pb2.SharedMemory(arena="../../etc/passwd", size_bytes=64)),
        "streams only",
    ),
    "a message of UCX": (tensor(ucx=tensor_pb2.Ucx(tag=1, size_bytes=64)), "streams only"),
    "codes that are not there": (tensor(inline=b"\xff" * 64), ""),
}


async def test_tensors_that_lie_are_refused_by_name(stack: Stack):
    decode, speak = "quartet.v1.Code2WavService/Decode", "quartet.v1.TalkerService/Speak"
    async with channel_to(stack, "code2wav") as decoder, channel_to(stack, "talker") as talker:
        for what, (lie, named) in TENSORS.items():
            request = code2wav_pb2.DecodeRequest(request_id=f"lie-{what}", codes=lie)
            status, text = await answer(decoder, decode, [request.SerializeToString()])
            assert (status, "codes" in text, named in text) == ("INVALID_ARGUMENT", True, True), (what, text)
            rows = [stream_pb2.Rows(name="token_ids", tensor=lie)]
            inline = talker_pb2.InlineThinkerOutput(header={"prompt_positions": 4}, rows=rows)
            start = talker_pb2.SpeakRequest(start={"request_id": f"lie-{what}", "inline": inline})
            status, text = await answer(talker, speak, [start.SerializeToString()])
            assert (status, named in text) == ("INVALID_ARGUMENT", True), (what, text)
