"""quartet.v1.ThinkerService: messages in, engine calls, messages out; and its start-up."""

import asyncio
import io
import math
import wave
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager, nullcontext

import grpc

from quartet.v1 import server_info_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.errors import InvalidInput, StageError, Unavailable
from services.common.media.decoders import Decoders
from services.common.rpc.call import serve_call
from services.common.rpc.requests import first_start, read_bytes
from services.common.rpc.status import abort
from services.common.sampling_limits import BACKGROUND_PRIORITY, BEAMS
from services.common.stage import Stage
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, Message, RawPrompt, SpokenInput
from services.thinker.delta_streams import DeltaStreams
from services.thinker.engine import ThinkerEngine
from services.thinker.generation import Generation
from services.thinker.lora import Adapters
from services.thinker.metrics import kv_cache_usage
from services.thinker.preprocess import Preprocessor
from services.thinker.request import read_conversation, read_tools, sampling_params

SERVICE_NAME = thinker_pb2.DESCRIPTOR.services_by_name["ThinkerService"].full_name
_WARM_UP_HZ = 16_000
GRACE_S = 0.5  # requests in flight get the engine's own error before the process goes


class ThinkerServicer(thinker_pb2_grpc.ThinkerServiceServicer):
    """Serves requests of `stage`. Set `engine` and `preprocessor` before admission opens."""

    def __init__(self, settings: ThinkerSettings, stage: Stage) -> None:
        self._settings = settings
        self._stage = stage
        self._deltas = DeltaStreams()
        self.engine: ThinkerEngine
        self.preprocessor: Preprocessor

    async def Generate(
        self, request_iterator: AsyncIterator[thinker_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[thinker_pb2.GenerateResponse]:
        start = await first_start(request_iterator, context)
        async with serve_call("thinker", start.request_id, context, self._stage.admission) as call:
            if start.priority < BACKGROUND_PRIORITY and not start.count_only:
                self.engine.expected.announce()
            hub, stream_id = self._stage.hub, start.output_stream_id
            stream = hub.open(stream_id, self.engine.offered_rows) if stream_id else nullcontext()
            with self.engine.adapters.use(start.lora) as lora, stream as output, ExitStack() as places:
                for _ in range(1, min(start.beams.width, int(BEAMS.most))):  # each other beam has a place, too
                    places.enter_context(self._stage.admission.admit())
                generation = Generation(self.engine, self.preprocessor, self._settings, start, output, call, lora)
                async with aclosing(self._generate(generation, request_iterator, start.count_only)) as responses:
                    async for response in self._deltas.redirected(responses, start.deltas_to):
                        yield response

    async def StreamDeltas(
        self, request: thinker_pb2.StreamDeltasRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[thinker_pb2.StreamDeltasResponse]:
        try:
            async with aclosing(self._deltas.serve(request.stream_id)) as messages:
                async for message in messages:
                    yield message
        except StageError as error:
            await abort(context, error)

    async def _generate(
        self, generation: Generation, requests: AsyncIterator[thinker_pb2.GenerateRequest], count_only: bool
    ) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        await generation.refuse()
        for file in generation.conversation.media:  # those that are not in the start
            if file.missing_bytes:
                file.data = await read_bytes(file.field, file.missing_bytes, requests)
                file.missing_bytes = 0
        yield await generation.prepare()
        if not count_only:
            has_beams = generation.start.HasField("beams")
            async with aclosing(generation.beams() if has_beams else generation.answer()) as answer:
                async for response in answer:
                    yield response
        yield generation.summary()

    async def Tokenize(
        self, request: thinker_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.TokenizeResponse:
        token_ids, tokens = [], []
        async with self._admitted(context):
            template, read = self.preprocessor.template, self.preprocessor.read
            if request.messages:
                start = thinker_pb2.GenerateStart(messages=request.messages, tools=request.tools)
                for name in ("chat_template_kwargs_json", "continue_final_message", "no_generation_prompt"):
                    setattr(start, name, getattr(request, name))
                tools, _ = read_tools(start)
                conversation = read_conversation(start, tools, self._settings)
                if conversation.media:
                    raise InvalidInput(conversation.media[0].field, "media are not counted here; send text")
                token_ids = await read(conversation.characters, template.apply, conversation, None)
            else:
                special = not request.no_special_tokens
                token_ids = await read(len(request.text), template.tokens, request.text, special)
            tokens = await read(len(token_ids), template.spelled, token_ids) if request.wants_tokens else []
        return thinker_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def Detokenize(
        self, request: thinker_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.DetokenizeResponse:
        text = ""
        async with self._admitted(context):
            read, token_ids = self.preprocessor.read, list(request.token_ids)
            text = await read(len(token_ids), self.preprocessor.template.text, token_ids)
        return thinker_pb2.DetokenizeResponse(text=text)

    async def DescribeTokenizer(
        self, request: thinker_pb2.DescribeTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.DescribeTokenizerResponse:
        config = ""
        async with self._admitted(context):
            config = await self.preprocessor.read(0, self.preprocessor.template.described)
        return thinker_pb2.DescribeTokenizerResponse(config_json=config)

    async def LoadLora(
        self, request: thinker_pb2.LoadLoraRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.LoadLoraResponse:
        is_new = False
        async with self._changing_adapters(context) as adapters:
            is_new = await adapters.load(request.name, request.path)
        return thinker_pb2.LoadLoraResponse(is_new=is_new)

    async def UnloadLora(
        self, request: thinker_pb2.UnloadLoraRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.UnloadLoraResponse:
        async with self._changing_adapters(context) as adapters:
            adapters.unload(request.name)
        return thinker_pb2.UnloadLoraResponse()

    @asynccontextmanager
    async def _changing_adapters(self, context: grpc.aio.ServicerContext) -> AsyncGenerator[Adapters]:
        """The engine's adapters; the stage's ServerInfo follows the change."""
        async with self._admitted(context):
            yield self.engine.adapters
            with self._stage.revising() as info:
                del info.thinker.loras[:]
                info.thinker.loras.extend(loras(self.engine.adapters))

    @asynccontextmanager
    async def _admitted(self, context: grpc.aio.ServicerContext) -> AsyncGenerator[None]:
        """A place of the stage's, for a call without a request id; errors inside become the call's status."""
        try:
            with self._stage.admission.admit():
                yield
        except StageError as error:
            await abort(context, error)


def loras(adapters: Adapters) -> list[server_info_pb2.Lora]:
    return [server_info_pb2.Lora(name=name, digest=digest) for name, digest in adapters.digests.items()]


async def serve(stage: Stage, settings: ThinkerSettings) -> None:
    """Runs the stage until it is told to stop. Raises if the engine cannot start, or died."""
    servicer = ThinkerServicer(settings, stage)
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(servicer, stage.grpc)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        decoders = Decoders(settings.decoding_memory_bytes, settings.max_decoding_s)
        stage.resources.callback(decoders.close)
        decoders.server.start()
        engine = await stage.load(ThinkerEngine.start(settings))
        stage.resources.push_async_callback(engine.close)
        preprocessor = Preprocessor(settings, engine, decoders)
        stage.resources.callback(preprocessor.close)
        stage.profiles.recorder = engine.recorder
        await _warm_up(engine, preprocessor)
        servicer.engine, servicer.preprocessor = engine, preprocessor
        stage.kv_cache_usage = kv_cache_usage
        watch = asyncio.create_task(_end_with(engine, stage))
        stage.resources.callback(watch.cancel)
        return stage.describe(
            engine.dtype,
            engine.device,
            volatile=("loras",),
            rows=[server_info_pb2.RowsInfo(name=name) for name in engine.offered_rows],
            thinker=server_info_pb2.ThinkerInfo(
                max_context_tokens=engine.max_context_tokens,
                accept_hidden_layer=engine.checkpoint.accept_hidden_layer,
                input_modalities=list(engine.checkpoint.placeholders),
                loras=loras(engine.adapters),
                max_loras=settings.max_loras,
                kv_block_tokens=engine.kv_block_tokens,
                kv_blocks=engine.kv_blocks,
                default_temperature=engine.sampling_defaults.get("temperature", 1.0),
                default_top_p=engine.sampling_defaults.get("top_p", 1.0),
                reasons=engine.checkpoint.reasoning is not None,
                transcribes=engine.speech_prompts is not None,
                max_sound_s=_finite(engine.speech_prompts.max_s) if engine.speech_prompts else 0.0,
                only_transcribes=engine.checkpoint.only_transcribes,
                calls_tools=bool(engine.checkpoint.tool_calls or engine.tool_parser),
            ),
        )

    await stage.serve(start)


async def _warm_up(engine: ThinkerEngine, preprocessor: Preprocessor) -> None:
    hello, answers = Conversation([Message("user", ["Hello"])]), not engine.checkpoint.only_transcribes
    if engine.speech_prompts is not None and not (answers and preprocessor.template.reads_users):
        hello = Conversation([], spoken=SpokenInput(MediaFile("audio", _silence(), "warm-up"), "en"))
    elif not engine.checkpoint.chat_template:
        hello = Conversation([], raw=RawPrompt("Hello"))
    prompt = await preprocessor.prepare(hello)
    request = thinker_pb2.SamplingParameters(max_tokens=2, ignore_eos=True)
    params = sampling_params(request, engine.sampling_defaults, engine.checkpoint.vocab_size)
    async for _ in engine.generate("warm-up", prompt, params):
        pass


def _silence() -> bytes:
    """A second of it, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(_WARM_UP_HZ)
        wav.writeframes(bytes(2 * _WARM_UP_HZ))
    return file.getvalue()


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


async def _end_with(engine: ThinkerEngine, stage: Stage) -> None:
    await engine.died()
    await asyncio.sleep(GRACE_S)
    stage.fatal(Unavailable("the thinker's engine died"))
