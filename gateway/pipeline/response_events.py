"""Events in the responses of stages."""

from typing import Any

from gateway.pipeline.events import (
    AudioDelta,
    CodesDelta,
    Event,
    PromptRead,
    PromptScores,
    PromptTokens,
    TextDelta,
    TextEnd,
    WholeBeam,
)
from quartet.v1 import code2wav_pb2, talker_pb2, tensor_pb2, thinker_pb2


class ResponseFault(Exception):
    """A response that breaks the contract. The message completes "the stage ..."."""


def no_event(start: Any, response: Any) -> Event | None:
    """None: clients see none of these responses."""


def thinker_event(start: thinker_pb2.GenerateStart, response: thinker_pb2.GenerateResponse) -> Event | None:
    match response.WhichOneof("message"):
        case "prompt":
            return PromptRead(response.prompt)
        case "prompt_logprobs":
            return PromptTokens(response.prompt_logprobs.tokens)
        case "prompt_scores":
            return PromptScores(response.prompt_scores)
        case "delta":
            return TextDelta(response.delta)
        case "beam":
            return WholeBeam(response.beam.delta, response.beam.summary)
        case "summary":
            return TextEnd(response.summary)
    return None


def talker_event(start: talker_pb2.SpeakStart, response: talker_pb2.SpeakResponse) -> Event | None:
    match response.WhichOneof("message"):
        case "started" if start.HasField("text"):
            return PromptRead(thinker_pb2.PromptInfo(), start.text.text)
        case "frames":
            codes = response.frames.tensor
            if codes.dtype != tensor_pb2.DATA_TYPE_INT32 or len(codes.shape) != 2:
                dtype = tensor_pb2.DataType.Name(codes.dtype)
                raise ResponseFault(f"sent {dtype} codes of shape {list(codes.shape)}")
            numbers, groups = memoryview(codes.inline).cast("i").tolist(), codes.shape[1]
            return CodesDelta([numbers[i : i + groups] for i in range(0, len(numbers), groups)]) if numbers else None
    return None


def code2wav_event(start: code2wav_pb2.DecodeRequest, response: code2wav_pb2.DecodeResponse) -> Event | None:
    if not response.HasField("audio"):
        return None
    samples = response.audio.samples
    if samples.dtype != tensor_pb2.DATA_TYPE_INT16:
        raise ResponseFault(f"sent {tensor_pb2.DataType.Name(samples.dtype)} samples, not PCM16")
    return AudioDelta(samples.inline) if samples.inline else None
