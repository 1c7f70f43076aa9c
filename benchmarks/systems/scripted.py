"""Stages that follow a timetable instead of a model: real gRPC servers, whose answers cost next to nothing.

For measuring what a gateway costs: `python -m benchmarks.systems.scripted` prints a line of JSON, the stages'
addresses, and serves until its input ends. An answer has a token at a time and sound at a multiple of its playing time.
After its first token, and its first piece of sound, it gets the next in steps that all answers share, as an engine that
batches has them.
"""

import argparse
import asyncio
import itertools
import json
import math
import sys
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.pipeline.kinds import KINDS
from quartet.v1 import (
    code2wav_pb2,
    code2wav_pb2_grpc,
    server_info_pb2,
    server_info_pb2_grpc,
    talker_pb2,
    talker_pb2_grpc,
    tensor_pb2,
    thinker_pb2,
    thinker_pb2_grpc,
    timings_pb2,
)
from services.common.rpc import channels
from services.thinker.delta_streams import DeltaStreams

MODEL = "scripted"
WORD = "word "  # of each token
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1920
_TIMINGS = timings_pb2.Timings(queue_ms=0, prefill_ms=1, first_output_ms=1, decode_ms=1, total_ms=1)


class Timetable:
    """When an answer's parts leave, from when its call began. `flags`: as `add_flags` has them."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._token_s = flags.token_ms / 1000
        self._frame_s = SAMPLES_PER_FRAME / SAMPLE_RATE_HZ / flags.speed
        self._tokens, self._frames = flags.tokens, round(flags.sound_s * SAMPLE_RATE_HZ / SAMPLES_PER_FRAME)
        delta = thinker_pb2.GenerateDelta(text=WORD, token_ids=[7])
        self._delta = thinker_pb2.GenerateResponse(delta=delta)
        sizes = _sizes(self._frames, flags.chunk_frames)
        noise = np.random.default_rng(0).integers(-9000, 9000, max(sizes) * SAMPLES_PER_FRAME, np.int16)
        self._chunks = [_chunk(noise[: size * SAMPLES_PER_FRAME]) for size in sizes]
        self._chunks_at_s = [self._frame_s * frames for frames in itertools.accumulate(sizes)]

    async def text(self) -> AsyncIterator[thinker_pb2.GenerateResponse]:
        """What the thinker answers."""
        yield thinker_pb2.GenerateResponse(prompt=thinker_pb2.PromptInfo(prompt_tokens=10))
        async for _ in _at([i * self._token_s for i in range(self._tokens)], self._token_s):
            yield self._delta
        stop = thinker_pb2.FINISH_REASON_STOP
        count = {"prompt_tokens": 10, "completion_tokens": self._tokens}
        summary = thinker_pb2.GenerateSummary(finish_reason=stop, timings=_TIMINGS, **count)
        yield thinker_pb2.GenerateResponse(summary=summary)

    async def speech(self) -> AsyncIterator[talker_pb2.SpeakResponse]:
        """What the talker answers."""
        yield talker_pb2.SpeakResponse(started=talker_pb2.SpeakStarted(speaker="one"))
        await asyncio.sleep(self._frames * self._frame_s)
        end = talker_pb2.SPEECH_END_STOP
        yield talker_pb2.SpeakResponse(summary=talker_pb2.SpeakSummary(frames=self._frames, end=end, timings=_TIMINGS))

    async def sound(self) -> AsyncIterator[code2wav_pb2.DecodeResponse]:
        """What code2wav answers."""
        async for i in _at(self._chunks_at_s, self._frame_s):
            yield self._chunks[i]
        facts = {"frames": self._frames, "samples": self._frames * SAMPLES_PER_FRAME, "sample_rate_hz": SAMPLE_RATE_HZ}
        yield code2wav_pb2.DecodeResponse(summary=code2wav_pb2.DecodeSummary(timings=_TIMINGS, **facts))


def _sizes(frames: int, most: int) -> list[int]:
    """Frames of each piece: they double from 1 to `most`, as code2wav's own grow with its listener's lead."""
    sizes, size = [], 1
    while frames:
        sizes.append(min(size, most, frames))
        frames, size = frames - sizes[-1], 2 * size
    return sizes


def _chunk(samples: np.ndarray) -> code2wav_pb2.DecodeResponse:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT16, shape=[len(samples)], inline=samples.tobytes())
    return code2wav_pb2.DecodeResponse(audio=code2wav_pb2.AudioChunk(samples=tensor))


async def _at(times_s: Sequence[float], step_s: float) -> AsyncIterator[int]:
    """The index of each time, when it is there, in seconds from now; what is late is not waited for. All but the first
    are put off to the next of the steps of `step_s` that all answers share."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for i, time_s in enumerate(times_s):
        due = began + time_s if i == 0 else math.ceil((began + time_s) / step_s) * step_s
        if (wait_s := due - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        yield i


class _Thinker(thinker_pb2_grpc.ThinkerServiceServicer):
    def __init__(self, timetable: Timetable) -> None:
        self._timetable, self._deltas = timetable, DeltaStreams()

    async def Generate(self, request_iterator, context):
        async for request in request_iterator:
            async for response in self._deltas.redirected(self._timetable.text(), request.start.deltas_to):
                yield response
            return

    async def StreamDeltas(self, request, context):
        async for message in self._deltas.serve(request.stream_id):
            yield message


class _Talker(talker_pb2_grpc.TalkerServiceServicer):
    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable

    async def Speak(self, request_iterator, context):
        async for response in self._timetable.speech():
            yield response


class _Code2Wav(code2wav_pb2_grpc.Code2WavServiceServicer):
    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable

    async def Decode(self, request, context):
        async for response in self._timetable.sound():
            yield response


class _ServerInfo(server_info_pb2_grpc.ServerInfoServiceServicer):
    def __init__(self, stage: str) -> None:
        self._info = server_info_pb2.GetServerInfoResponse(stage=stage, model=MODEL)
        if stage == "thinker":
            self._info.thinker.input_modalities.append("audio")
        elif stage == "talker":
            self._info.talker.speakers.append("one")
            self._info.talker.reads_text, self._info.talker.max_context_positions = True, 4096
        else:
            self._info.code2wav.sample_rate_hz = SAMPLE_RATE_HZ
            self._info.code2wav.samples_per_frame = SAMPLES_PER_FRAME

    async def GetServerInfo(self, request, context):
        return self._info

    async def GetLoad(self, request, context):
        return server_info_pb2.GetLoadResponse(serving=True)


async def serve(timetable: Timetable) -> None:
    """Serves until the input of this process ends."""
    servers, addresses = [], {}
    for stage in ("thinker", "talker", "code2wav"):
        server = grpc.aio.server(options=channels.SERVER_OPTIONS)
        thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(_Thinker(timetable), server)
        talker_pb2_grpc.add_TalkerServiceServicer_to_server(_Talker(timetable), server)
        code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(_Code2Wav(timetable), server)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(_ServerInfo(stage), server)
        servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        await servicer.set(KINDS[stage].service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        addresses[stage] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(server.stop(grace=None) for server in servers))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what an answer is like."""
    parser.add_argument("--tokens", type=int, default=40, help="of an answer's text")
    parser.add_argument("--token-ms", type=float, default=25.0, help="time between two tokens")
    parser.add_argument("--sound-s", type=float, default=18.0, help="playing time of an answer")
    parser.add_argument("--chunk-frames", type=int, default=16, help="most codec frames of a piece of sound")
    parser.add_argument("--speed", type=float, default=3.0, help="times faster than playing that sound is made")


def flags_of(flags: argparse.Namespace) -> list[str]:
    """`flags` as they are given to this program."""
    names = ("tokens", "token_ms", "sound_s", "chunk_frames", "speed")
    return [f"--{name.replace('_', '-')}={getattr(flags, name)}" for name in names]


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    asyncio.run(serve(Timetable(parser.parse_args())))


if __name__ == "__main__":
    main()
