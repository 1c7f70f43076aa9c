"""Drives the stages of a running system over gRPC, as the gateway does, and keeps what only tests look at."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quartet.v1 import (
    code2wav_pb2,
    code2wav_pb2_grpc,
    media_pb2,
    stream_pb2,
    talker_pb2,
    talker_pb2_grpc,
    thinker_pb2,
    thinker_pb2_grpc,
)
from services.common.stream.tensors import to_message, to_torch
from tests.support.references.qwen3_omni import ReferenceAnswer
from tests.support.stage.streaming import CHANNELS

MEDIA_KINDS = {
    "image": media_pb2.MEDIA_KIND_IMAGE,
    "audio": media_pb2.MEDIA_KIND_AUDIO,
    "video": media_pb2.MEDIA_KIND_VIDEO,
}


@dataclass
class Spoken:
    """What a conversation came to: token ids and text, codec codes (frames, groups), samples (n,) float32."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    summary: thinker_pb2.GenerateSummary | None = None
    codes: np.ndarray | None = None
    samples: np.ndarray | None = None


def messages(*turns: tuple[str, str | Sequence[str | tuple[str, bytes]]]) -> list[thinker_pb2.ChatMessage]:
    """Messages from (role, text) or (role, [text or (kind, file's bytes), ...])."""
    result = []
    for role, content in turns:
        message = thinker_pb2.ChatMessage(role=role)
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                message.content.add(text=part)
            else:
                message.content.add(media=media_pb2.Media(kind=MEDIA_KINDS[part[0]], data=part[1]))
        result.append(message)
    return result


async def think(address: str, start: thinker_pb2.GenerateStart) -> Spoken:
    """Runs `start` on a thinker to its end."""

    async def requests():
        yield thinker_pb2.GenerateRequest(start=start)

    spoken = Spoken()
    async for response in thinker_pb2_grpc.ThinkerServiceStub(CHANNELS.channel(address)).Generate(requests()):
        spoken.token_ids += response.delta.token_ids
        spoken.text += response.delta.text
        if response.HasField("summary"):
            spoken.summary = response.summary
    return spoken


async def speak(address: str, source: stream_pb2.StreamSource, max_frames: int, **request) -> np.ndarray:
    """Greedy codec codes (frames, groups) int32 for what a thinker streams."""
    sampling = talker_pb2.TalkerSampling(temperature=0, max_frames=max_frames)
    start = talker_pb2.SpeakStart(request_id=source.stream_id, source=source, sampling=sampling, **request)
    requests = [talker_pb2.SpeakRequest(start=start)]
    frames = []
    async for response in talker_pb2_grpc.TalkerServiceStub(CHANNELS.channel(address)).Speak(requests):
        if response.HasField("frames"):
            frames.append(to_torch(response.frames.tensor).numpy())
    return np.concatenate(frames) if frames else np.zeros((0, 1), np.int32)


async def decode(address: str, codes: np.ndarray) -> np.ndarray:
    """Float32 samples for `codes`."""
    import torch

    request = code2wav_pb2.DecodeRequest(request_id=uuid.uuid4().hex, codes=to_message(torch.from_numpy(codes)))
    pieces = []
    async for response in code2wav_pb2_grpc.Code2WavServiceStub(CHANNELS.channel(address)).Decode(request):
        if response.HasField("audio"):
            pieces.append(to_torch(response.audio.samples).numpy())
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


async def converse(
    addresses: dict[str, str],
    conversation: list[thinker_pb2.ChatMessage],
    max_tokens: int,
    max_frames: int,
    use_audio_in_video: bool = False,
) -> Spoken:
    """A conversation, greedy, through the three stages: the talker pulls from the thinker while it decodes."""
    stream_id = uuid.uuid4().hex
    start = thinker_pb2.GenerateStart(
        request_id=stream_id,
        messages=conversation,
        sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=max_tokens),
        output_stream_id=stream_id,
        use_audio_in_video=use_audio_in_video,
    )
    source = stream_pb2.StreamSource(address=addresses["thinker"], stream_id=stream_id)
    spoken, codes = await asyncio.gather(
        think(addresses["thinker"], start), speak(addresses["talker"], source, max_frames)
    )
    spoken.codes = codes
    spoken.samples = await decode(addresses["code2wav"], codes) if len(codes) else np.zeros(0, np.float32)
    return spoken


def compare(answer: ReferenceAnswer, spoken: Spoken) -> None:
    """Asserts that a conversation came to the reference's tokens and codes, and to its samples within 1e-4."""
    assert spoken.token_ids[: len(answer.token_ids)] == answer.token_ids
    assert len(spoken.token_ids) - len(answer.token_ids) in (0, 1)  # the end-of-sequence token
    assert spoken.codes is not None
    assert spoken.samples is not None
    assert spoken.codes.tolist() == answer.codes.tolist()
    assert spoken.samples.shape == answer.waveform.shape
    assert np.allclose(spoken.samples, answer.waveform, rtol=0, atol=1e-4)
