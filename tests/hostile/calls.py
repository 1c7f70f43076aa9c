"""A client of stages that sends bytes, whatever they are, and what they cost a stage's process."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.message import Message

from quartet.v1 import code2wav_pb2, dit_pb2, stream_pb2, talker_pb2, thinker_pb2
from tests.hostile.messages import methods

GUARD_S = 60.0  # of one call
TRIES = 5
# grpc.aio: a write, or the end of the requests, came after the call's end, whose status is lost.
_WRITE_FAILED = "Internal error from Core"
_numbers = iter(range(10**9))

# Statuses of a peer's own fault, or of none.
TYPED = {
    "OK",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "UNAVAILABLE",
    "CANCELLED",
    "UNIMPLEMENTED",
}
ENDLESS = ("ThinkerService/StreamDeltas", "Health/Watch")
ENOUGH = 20  # responses of a call that may have many


@dataclass
class Rise:
    """Of a process's largest resident size, in a block."""

    mib: float = 0.0


@contextmanager
def rise(pid: int) -> Iterator[Rise]:
    status, found = Path(f"/proc/{pid}/status"), Rise()

    def mib(name: str) -> float:
        match = re.search(rf"{name}:\s*(\d+) kB", status.read_text())
        assert match
        return int(match[1]) / 1024

    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = mib("VmRSS")
    yield found
    found.mib = mib("VmHWM") - before


async def answer(
    channel: grpc.aio.Channel, name: str, messages: Sequence[bytes], finishes: bool = True
) -> tuple[str, str]:
    """(Status, its text) of a call with these messages. One that `finishes` not keeps its requests open."""
    for _ in range(TRIES):
        status, text = await _answer(channel, name, messages, finishes)
        if not text.startswith(_WRITE_FAILED):
            break
    return status, text


async def _answer(channel: grpc.aio.Channel, name: str, messages: Sequence[bytes], finishes: bool) -> tuple[str, str]:
    method = methods()[name]
    kind = "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if not finishes:
            await asyncio.Event().wait()

    request = requests() if method.client_streaming else messages[0]
    call = getattr(channel, kind)(f"/{name}")(request, timeout=GUARD_S)
    try:
        if not method.server_streaming:
            await call
        else:
            count = 0
            async for _ in call:
                count += 1
                if name.endswith(ENDLESS) or count >= ENOUGH:
                    return "OK", ""
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    finally:
        call.cancel()
    return "OK", ""


def honest(name: str) -> bytes:
    """A request that the stage answers soon."""
    request_id = f"hostile-{next(_numbers)}"
    message: Message
    match name.partition("quartet.v1.")[2]:
        case "ThinkerService/Generate":
            said = [thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text="hi")])]
            sampling = thinker_pb2.SamplingParameters(max_tokens=1, temperature=0)
            start = thinker_pb2.GenerateStart(request_id=request_id, messages=said, sampling=sampling)
            message = thinker_pb2.GenerateRequest(start=start)
        case "ThinkerService/StreamDeltas":
            message = thinker_pb2.StreamDeltasRequest(stream_id=request_id)
        case "ThinkerService/Tokenize":
            message = thinker_pb2.TokenizeRequest(text="hi")
        case "ThinkerService/Detokenize":
            message = thinker_pb2.DetokenizeRequest(token_ids=[1])
        case "ThinkerService/DescribeTokenizer":
            message = thinker_pb2.DescribeTokenizerRequest()
        case "TalkerService/Speak":
            sampling = talker_pb2.TalkerSampling(max_frames=1)
            text = talker_pb2.SpokenText(text="Hello.")
            message = talker_pb2.SpeakRequest(
                start=talker_pb2.SpeakStart(request_id=request_id, sampling=sampling, text=text)
            )
        case "Code2WavService/Decode":
            message = code2wav_pb2.DecodeRequest(request_id=request_id, prompt_frames=0)
        case "TensorStreamService/Subscribe":
            subscription = stream_pb2.Subscription(stream_id=request_id, request_id=request_id, initial_credits=1)
            message = stream_pb2.SubscribeRequest(subscription=subscription)
        case "DitService/Generate":
            message = dit_pb2.DitServiceGenerateRequest(
                start=dit_pb2.DitStart(
                    request_id=request_id, prompt="a cat", num_inference_steps=2, width=32, height=32
                )
            )
        case _:
            return b""
    return message.SerializeToString()
