"""A code2wav of some frames of sound."""

import numpy as np

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, tensor_pb2
from tests.support.scripted.script import TIMINGS, Script

SAMPLE_RATE_HZ = 16000
SAMPLES_PER_FRAME = 1280
PCM16 = np.arange(3 * SAMPLES_PER_FRAME, dtype="<i2").tobytes()


def sound(frames: int | None) -> bytes:
    """PCM16 of so many frames; of the usual three by default."""
    return PCM16 if frames is None else np.arange(frames * SAMPLES_PER_FRAME).astype("<i2").tobytes()


class Code2Wav(code2wav_pb2_grpc.Code2WavServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Decode(self, request, context):
        outputs, lengths = [], self.script.lengths
        frames = self.script.frames if lengths is None else await lengths(request.request_id)
        pcm16 = sound(frames)
        for begin in range(0, len(pcm16), 2 * SAMPLES_PER_FRAME):
            piece = pcm16[begin : begin + 2 * SAMPLES_PER_FRAME]
            samples = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT16, shape=[len(piece) // 2], inline=piece)
            outputs.append(code2wav_pb2.DecodeResponse(audio=code2wav_pb2.AudioChunk(samples=samples)))
        summary = code2wav_pb2.DecodeSummary(
            frames=frames or 3, samples=len(pcm16) // 2, sample_rate_hz=SAMPLE_RATE_HZ, timings=TIMINGS
        )
        outputs.append(code2wav_pb2.DecodeResponse(summary=summary))
        async for output in self.script.play(request, outputs, context):
            yield output
