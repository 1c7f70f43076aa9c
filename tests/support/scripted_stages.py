"""Stages that follow a script: real gRPC servers with the real services, but no model behind them."""

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from quartet.v1 import (
    code2wav_pb2,
    code2wav_pb2_grpc,
    dit_pb2,
    dit_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    server_info_pb2,
    server_info_pb2_grpc,
    stream_pb2,
    talker_pb2,
    talker_pb2_grpc,
    tensor_pb2,
    thinker_pb2,
    thinker_pb2_grpc,
    timings_pb2,
)
from services.common.errors import InvalidInput, NotFound, StageError
from services.common.rpc import channels
from services.common.rpc.status import abort
from services.thinker.delta_streams import DeltaStreams, redirected

# An address of this process alone: a server that is started again finds its port as free as it left it.
HOST = f"127.{os.getpid() // 65536 % 250 + 1}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
SAMPLE_RATE_HZ = 16000
SAMPLES_PER_FRAME = 1280
PCM16 = np.arange(3 * SAMPLES_PER_FRAME, dtype="<i2").tobytes()
CODES = [[1, 2], [3, 4], [5, 6]]  # frames of the talker
PIECES = ("Hello", ", ", "world")
VOICES = ["chelsie", "ethan"]
DIT_STEPS = 4
DRAWN_SEED = 99
PICTURES = server_info_pb2.DitInfo(
    tasks=[dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_IMAGE_EDIT],
    pipeline="ScriptedPipeline",
    default_width=64,
    default_height=48,
    size_multiple=16,
    max_pixels=256 * 256,
    default_inference_steps=DIT_STEPS,
    max_inference_steps=50,
    default_guidance_scale=4,
    negative_prompt=True,
    max_images=3,
    mask=True,
    max_count=4,
    loras=["ink", "oil"],
    batched=True,
)
TIMINGS = timings_pb2.Timings(queue_ms=1, prefill_ms=2, first_output_ms=3, decode_ms=4, total_ms=5)


@dataclass
class Script:
    """What a stage does and what happened to it.

    Attributes:
        error: raised after the first `after` outputs; or a status as gRPC itself makes it of a stage that is gone.
        after: outputs before `error` or `hold`.
        hold: wait here until `release` is set.
        requests: the start messages received.
        media: bytes that came in MediaChunks.
        typed: text that came after the start.
        ended: "done" or "cancelled", one for each call.
        running: calls that have not ended.
        queued: requests that it says to have waiting.
        too_long: the answer ends at its most tokens.
        ids_reusable: what a thinker says of the answer's token ids.
        thought: pieces of what a thinker thinks before it answers.
        takes_s: how long a call takes, beside.
        calls: (name, arguments) of functions that the next answers call, one each; those after them are text.
        missing: a directory that no adapter can be loaded from.
    """

    error: StageError | tuple[grpc.StatusCode, str] | None = None
    after: int = 0
    hold: bool = False
    logprobs: bool = False
    tool_call: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)
    too_long: bool = False
    ids_reusable: bool = True
    thought: Sequence[str] = ()
    missing: str = ""
    requests: list[Any] = field(default_factory=list)
    media: bytearray = field(default_factory=bytearray)
    typed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    takes_s: Callable[[], float] = lambda: 0.0
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def go_on(self) -> None:
        """No call stands still any more."""
        self.hold = False
        self.release.set()

    async def reset(self) -> None:
        """As new, once its calls have ended: those that stand still go on."""
        self.go_on()
        async with asyncio.timeout(60):
            while self.running:
                await asyncio.sleep(0.005)
        vars(self).update(vars(Script()))

    async def play(self, request: Any, outputs: list[Any], context: grpc.aio.ServicerContext) -> AsyncGenerator[Any]:
        """The outputs, as far as the script goes."""
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(self.takes_s())
            for i, output in enumerate([*outputs, None]):
                if i == self.after and self.hold:
                    self.holding.set()
                    await self.release.wait()
                if i == self.after and isinstance(self.error, tuple):
                    await context.abort(*self.error)
                if i == self.after and isinstance(self.error, StageError):
                    await abort(context, self.error)
                if output is not None:
                    yield output
            self.ended.append("done")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            self.running -= 1


class Thinker(thinker_pb2_grpc.ThinkerServiceServicer):
    """It has any adapter but those in a directory `missing`, whose digest is the directory's name."""

    def __init__(self, script: Script, server: "ServerInfo") -> None:
        self.script, self.server, self._deltas = script, server, DeltaStreams()

    async def StreamDeltas(self, request, context):
        async for message in self._deltas.serve(request.stream_id):
            yield message

    async def Tokenize(self, request, context):
        """A token for each character; a conversation is its texts."""
        text = request.text or "".join(part.text for message in request.messages for part in message.content)
        self.script.requests.append(request)
        return thinker_pb2.TokenizeResponse(token_ids=map(ord, text), tokens=list(text) if request.wants_tokens else [])

    async def Detokenize(self, request, context):
        if max(request.token_ids, default=0) > sys.maxunicode:
            await abort(context, InvalidInput("token_ids", "is none"))
        return thinker_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def LoadLora(self, request, context):
        if request.path == self.script.missing:
            await abort(context, InvalidInput("path", "has no adapter_config.json"))
        loras = self.server.info.thinker.loras
        is_new = request.name not in [lora.name for lora in loras]
        if is_new:
            loras.add(name=request.name, digest=request.path)
            self.server.revision += 1
        return thinker_pb2.LoadLoraResponse(is_new=is_new)

    async def UnloadLora(self, request, context):
        loras = self.server.info.thinker.loras
        kept = [lora for lora in loras if lora.name != request.name]
        if len(kept) == len(loras):
            await abort(context, NotFound(f"there is no adapter {request.name!r}"))
        del loras[:]
        loras.extend(kept)
        self.server.revision += 1
        return thinker_pb2.UnloadLoraResponse()

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        media = [p.media for m in start.messages for p in m.content] + list(start.prompt.media)
        expected = sum(each.size_bytes for each in media if not each.data)
        received = 0
        while received < expected:
            chunk = (await anext(request_iterator)).media.data
            received += len(chunk)
            self.script.media += chunk
        deltas = [thinker_pb2.GenerateDelta(text=text, token_ids=[i]) for i, text in enumerate(PIECES)]
        if self.script.logprobs:
            for delta in deltas:
                top = [thinker_pb2.TokenLogprob(token="x", token_bytes=b"x", logprob=-0.5)]
                token = thinker_pb2.TokenLogprob(token=delta.text, token_bytes=delta.text.encode(), logprob=-0.5)
                token.top.extend(top)
                delta.logprobs.append(token)
        reason = thinker_pb2.FINISH_REASON_LENGTH if self.script.too_long else thinker_pb2.FINISH_REASON_STOP
        if self.script.calls:
            name, arguments = self.script.calls.pop(0)
            half = len(arguments) // 2
            calls = [
                thinker_pb2.ToolCallDelta(index=0, id=f"call_{name}", name=name),
                thinker_pb2.ToolCallDelta(index=0, arguments_json=arguments[:half]),
                thinker_pb2.ToolCallDelta(index=0, arguments_json=arguments[half:]),
            ]
            deltas = [thinker_pb2.GenerateDelta(token_ids=[i], tool_calls=[call]) for i, call in enumerate(calls)]
            reason = thinker_pb2.FINISH_REASON_TOOL_CALLS
        if self.script.tool_call:
            calls = [
                thinker_pb2.ToolCallDelta(index=0, id="call_1", name="lamp"),
                thinker_pb2.ToolCallDelta(index=0, arguments_json='{"on":'),
                thinker_pb2.ToolCallDelta(index=0, arguments_json="true}"),
            ]
            deltas = [thinker_pb2.GenerateDelta(token_ids=[i], tool_calls=[call]) for i, call in enumerate(calls)]
            reason = thinker_pb2.FINISH_REASON_TOOL_CALLS
        thought = [thinker_pb2.GenerateDelta(reasoning=piece, token_ids=[9]) for piece in self.script.thought]
        summary = thinker_pb2.GenerateSummary(
            finish_reason=reason,
            prompt_tokens=10,
            cached_tokens=2,
            completion_tokens=3 + len(thought),
            reasoning_tokens=len(thought),
            timings=TIMINGS,
            token_ids_reusable=self.script.ids_reusable,
        )
        prompt = thinker_pb2.PromptInfo(prompt_tokens=10, audio_tokens=3, image_tokens=4)
        outputs = [
            thinker_pb2.GenerateResponse(prompt=prompt),
            *(thinker_pb2.GenerateResponse(prompt_logprobs=told) for told in _prompt_logprobs(start)),
            *(thinker_pb2.GenerateResponse(delta=delta) for delta in (*thought, *deltas) if not start.count_only),
            thinker_pb2.GenerateResponse(summary=summary),
        ]
        sink = self._deltas.to(start.deltas_to)
        # closed here: one that a failure leaves behind would count as running until it is collected
        async with aclosing(self.script.play(start, outputs, context)) as played:
            async for output in redirected(played, sink):
                yield output


def _prompt_logprobs(start: thinker_pb2.GenerateStart) -> Iterator[thinker_pb2.PromptLogprobs]:
    """A message for each character or id, likelier from one to the next."""
    if start.sampling.HasField("prompt_logprobs"):
        for i, token_id in enumerate(map(ord, start.prompt.text) if start.prompt.text else start.prompt.token_ids.ids):
            token = thinker_pb2.TokenLogprob(token_id=token_id, token=chr(token_id), logprob=-1 / i if i else math.nan)
            token.rank = 2 if i else 0
            for _ in range(start.sampling.prompt_logprobs if i else 0):
                token.top.add(token_id=120, token="x", logprob=-0.125, rank=1)
            yield thinker_pb2.PromptLogprobs(tokens=[token])


class Talker(talker_pb2_grpc.TalkerServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Speak(self, request_iterator, context):
        request = (await anext(request_iterator)).start
        end = talker_pb2.SPEECH_END_STOP
        summary = talker_pb2.SpeakSummary(frames=3, end=end, timings=TIMINGS, text_tokens=4)
        outputs = [talker_pb2.SpeakResponse(started=talker_pb2.SpeakStarted(speaker=request.speaker))]
        if request.wants_frames or not request.output_stream_id:
            outputs += [talker_pb2.SpeakResponse(frames=_codes(first, end)) for first, end in ((0, 2), (2, len(CODES)))]
        outputs.append(talker_pb2.SpeakResponse(summary=summary))

        async def listen() -> None:
            async for more in request_iterator:
                self.script.typed.append(more.text)

        listening = asyncio.create_task(listen())
        try:
            async with aclosing(self.script.play(request, outputs, context)) as played:
                async for output in played:
                    if output.HasField("summary"):
                        await listening
                    yield output
        finally:
            listening.cancel()


def _codes(first: int, end: int) -> stream_pb2.Rows:
    codes = np.array(CODES[first:end], np.int32)
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=codes.shape, inline=codes.tobytes())
    return stream_pb2.Rows(name="codes", first_position=first, tensor=tensor)


class Code2Wav(code2wav_pb2_grpc.Code2WavServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Decode(self, request, context):
        outputs = []
        for begin in range(0, len(PCM16), 2 * SAMPLES_PER_FRAME):
            piece = PCM16[begin : begin + 2 * SAMPLES_PER_FRAME]
            samples = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT16, shape=[len(piece) // 2], inline=piece)
            outputs.append(code2wav_pb2.DecodeResponse(audio=code2wav_pb2.AudioChunk(samples=samples)))
        summary = code2wav_pb2.DecodeSummary(
            frames=3, samples=len(PCM16) // 2, sample_rate_hz=SAMPLE_RATE_HZ, timings=TIMINGS
        )
        outputs.append(code2wav_pb2.DecodeResponse(summary=summary))
        async for output in self.script.play(request, outputs, context):
            yield output


def picture_of(seed: int, width: int = 64, height: int = 48) -> np.ndarray:
    """What the scripted dit makes of a seed, smooth colours: (height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x // width, 255 * y // height
    return np.stack([red, green, np.full_like(x, 37 * seed % 256)], axis=-1).astype(np.uint8)


class Dit(dit_pb2_grpc.DitServiceServicer):
    """Makes pictures. The last output is sent first, each in two pieces."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        files = [*start.images, *([start.mask] if start.HasField("mask") else [])]
        assert not any(file.data for file in files)
        received = 0
        while received < sum(file.size_bytes for file in files):
            chunk = (await anext(request_iterator)).media.data
            received += len(chunk)
            self.script.media += chunk
        seed = start.seed if start.HasField("seed") else DRAWN_SEED
        steps, count = start.num_inference_steps or DIT_STEPS, start.count or 1
        started = dit_pb2.DitStarted(seed=seed, count=count, num_inference_steps=steps)
        outputs = [dit_pb2.DitServiceGenerateResponse(started=started)]
        for step in range(1, steps + 1):
            for output in range(count):
                progress = dit_pb2.DitProgress(output=output, step=step, num_inference_steps=steps)
                outputs.append(dit_pb2.DitServiceGenerateResponse(progress=progress))
                if step <= start.previews:
                    preview = dit_pb2.DitPreview(
                        output=output, index=step - 1, step=step, pixels=_pixels(picture_of(1000 + step, 16, 12))
                    )
                    outputs.append(dit_pb2.DitServiceGenerateResponse(preview=preview))
        for output in reversed(range(count)):
            picture = picture_of(seed + output, start.width or 64, start.height or 48)
            for rows in (slice(0, 10), slice(10, None)):
                piece = dit_pb2.DitPiece(
                    output=output, first=rows.start, total=len(picture), data=_pixels(picture[rows])
                )
                outputs.append(dit_pb2.DitServiceGenerateResponse(piece=piece))
        summary = dit_pb2.DitSummary(count=count, steps=steps * count, timings=TIMINGS, mean_batch=count)
        outputs.append(dit_pb2.DitServiceGenerateResponse(summary=summary))
        async for output in self.script.play(start, outputs, context):
            yield output


class Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Reads prompts for a dit; has no streams, as the scripted dit subscribes to none."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Encode(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        outputs = [encoder_pb2.EncodeResponse(summary=encoder_pb2.EncodeSummary(timings=TIMINGS))]
        async for output in self.script.play(start, outputs, context):
            yield output


def _pixels(pixels: np.ndarray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=pixels.shape, inline=pixels.tobytes())


class ServerInfo(server_info_pb2_grpc.ServerInfoServiceServicer):
    def __init__(self, stage: str, script: Script) -> None:
        self.script = script
        self.revision, self.serving = 0, True
        self.info = server_info_pb2.GetServerInfoResponse(stage=stage, model="scripted")
        self.info.thinker.input_modalities.extend(["audio", "image"])
        self.info.thinker.kv_block_tokens, self.info.thinker.kv_blocks = 16, 100
        if stage == "dit":
            self.info.model = "scripted-dit"
            self.info.dit.CopyFrom(PICTURES)
        elif stage == "encoder":
            self.info.encoder.pipeline = PICTURES.pipeline
        elif stage == "talker":
            self.info.talker.speakers.extend(VOICES)
            self.info.talker.max_context_positions, self.info.talker.reads_text = 4096, True
            self.info.talker.takes_instructions, self.info.talker.num_code_groups = True, len(CODES[0])
        elif stage == "code2wav":
            self.info.code2wav.sample_rate_hz = SAMPLE_RATE_HZ
            self.info.code2wav.samples_per_frame = SAMPLES_PER_FRAME

    async def GetServerInfo(self, request, context):
        return self.info

    async def GetLoad(self, request, context):
        running, queued = self.script.running, self.script.queued
        return server_info_pb2.GetLoadResponse(
            running=running,
            queued=queued,
            info_revision=self.revision,
            kv_cache_usage=running / 4,
            serving=self.serving,
        )


class ScriptedStages:
    """A server for each of `kinds`.

    Attributes:
        scripts: what each does, by stage; to be changed by tests.
        addresses: "host:port" by stage.
        servers: the servers by stage; stopping one without grace is what a killed process looks like.
        infos: what they say of themselves.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.scripts = {stage: Script() for stage in kinds}
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, grpc.aio.Server] = {}
        self.infos = {stage: ServerInfo(stage, script) for stage, script in self.scripts.items()}

    async def start(self, stage: str) -> None:
        """Starts a server, at the address it had before if any."""
        server = self.servers[stage] = grpc.aio.server(options=channels.SERVER_OPTIONS)
        script = self.scripts[stage]
        if stage == "thinker":
            thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(Thinker(script, self.infos[stage]), server)
        elif stage == "talker":
            talker_pb2_grpc.add_TalkerServiceServicer_to_server(Talker(script), server)
        elif stage == "dit":
            dit_pb2_grpc.add_DitServiceServicer_to_server(Dit(script), server)
        elif stage == "encoder":
            encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Encoder(script), server)
        else:
            code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(Code2Wav(script), server)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self.infos[stage], server)
        self.infos[stage].serving = True
        address = self.addresses.get(stage, f"{HOST}:0")
        port = server.add_insecure_port(address)
        self.addresses[stage] = f"{address.rpartition(':')[0]}:{port}"
        await server.start()

    def set_serving(self, stage: str, serving: bool) -> None:
        """Has a stage report from now on that it serves, or does not."""
        self.infos[stage].serving = serving


@asynccontextmanager
async def scripted_stages(*kinds: str, of: type[ScriptedStages] = ScriptedStages) -> AsyncIterator[ScriptedStages]:
    """Running servers, as `of` makes them; by default those that speak: thinker, talker and code2wav."""
    kinds = kinds or ("thinker", "talker", "code2wav")
    stages = of(kinds)
    for stage in kinds:
        await stages.start(stage)
    try:
        yield stages
    finally:
        await asyncio.gather(*(server.stop(grace=None) for server in stages.servers.values()))
