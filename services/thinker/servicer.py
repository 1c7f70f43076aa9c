"""quartet.v1.ThinkerService: messages in, engine calls, messages out; and its start-up: engine, one warm-up request."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc

from quartet.v1 import server_info_pb2, stream_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.errors import InvalidInput, StageError, Unavailable
from services.common.rpc.call import Call, serve_call
from services.common.rpc.requests import first_start, read_bytes
from services.common.rpc.status import abort
from services.common.stage import Stage
from services.common.stream.output_stream import OutputStream
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Message, Prompt
from services.thinker.delta_streams import DeltaStreams, redirected
from services.thinker.engine import Step, ThinkerEngine
from services.thinker.family import ToolCallMarkers
from services.thinker.lora import Adapters
from services.thinker.metrics import kv_cache_usage
from services.thinker.named_tools import NamedToolParser
from services.thinker.output import DeltaWriter, RowForwarder, offered_rows
from services.thinker.preprocess import Preprocessor
from services.thinker.reasoning import ThoughtParser
from services.thinker.request import read_conversation, read_tools, sampling_params
from services.thinker.template import is_reusable
from services.thinker.tools import ToolCallParser

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

STAGE = "thinker"
SERVICE_NAME = thinker_pb2.DESCRIPTOR.services_by_name["ThinkerService"].full_name
# Requests in flight get the engine's own error before the process goes.
GRACE_S = 0.5
_ANY_MARKERS = ToolCallMarkers("<tool_call>", "</tool_call>")  # a forced call has none around it


class ThinkerServicer(thinker_pb2_grpc.ThinkerServiceServicer):
    """Serves requests of `stage` with `engine` and `preprocessor`, which are set once they are loaded, before
    admission opens."""

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
        async with serve_call(STAGE, start.request_id, context, self._stage.admission) as call:
            hub, rows = self._stage.hub, offered_rows(self.engine.row_kinds)
            stream = hub.open(start.output_stream_id, rows) if start.output_stream_id else nullcontext()
            with self.engine.adapters.use(start.lora) as lora, stream as output:
                async with aclosing(self._generate(start, request_iterator, call, output, lora)) as responses:
                    async for response in redirected(responses, self._deltas.to(start.deltas_to)):
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
        self,
        start: thinker_pb2.GenerateStart,
        requests: AsyncIterator[thinker_pb2.GenerateRequest],
        call: Call,
        output: OutputStream | None,
        lora: "LoRARequest | None",
    ) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        engine, checkpoint = self.engine, self.engine.checkpoint
        if start.count_only and output is not None:
            raise InvalidInput("output_stream_id", "must be unset with count_only: there is nothing to stream")
        if start.sampling.HasField("prompt_logprobs") and not self._settings.prompt_logprobs:
            reason = "is for thinkers that were started with --prompt-logprobs=true; leave it out"
            raise InvalidInput("sampling.prompt_logprobs", reason)
        tools, schema = read_tools(start)
        if tools and schema is None and not (checkpoint.tool_calls or engine.tool_parser):
            raise InvalidInput("tools[0]", "this model has no tools; leave them out")
        params = sampling_params(start.sampling, engine.sampling_defaults, checkpoint.vocab_size, schema)
        await engine.validate(params, start.sampling.WhichOneof("structure"))
        conversation = read_conversation(start, tools, self._settings)
        await _read_media(conversation, requests)
        prompt, selections = await self._prepare(conversation, output)
        prompt_tokens = len(prompt.token_ids)
        call.set(prompt_tokens=prompt_tokens)
        yield thinker_pb2.GenerateResponse(
            prompt=thinker_pb2.PromptInfo(
                prompt_tokens=prompt_tokens, audio_tokens=prompt.audio_tokens, image_tokens=prompt.image_tokens
            )
        )
        summary = thinker_pb2.GenerateSummary(prompt_tokens=prompt_tokens)
        if start.count_only:
            summary.timings.CopyFrom(call.timings.to_message())
            yield thinker_pb2.GenerateResponse(summary=summary)
            return
        parser = self._tool_parser(tools, is_forced=schema is not None)
        if isinstance(parser, NamedToolParser) and parser.reads_special_tokens:
            params.skip_special_tokens = False
        deltas = self._writer(start, prompt, parser)
        forwarder = None
        if output:
            markers = checkpoint.tool_calls if tools else None
            opening_id = checkpoint.token_id(markers.opening) if markers else None
            forwarder = RowForwarder(output, prompt, selections, opening_id)
            if schema is not None:
                forwarder.close()  # the answer is a call: there is nothing to speak
        subscription = forwarder.subscription() if forwarder else None
        tells_prompt = start.sampling.HasField("prompt_logprobs")
        answer = engine.generate(start.request_id, prompt, params, subscription, priority=start.priority, lora=lora)
        async with aclosing(answer) as steps:
            async for step in steps:
                if forwarder:
                    forwarder.add(step)
                _mark(call, step)
                if tells_prompt:
                    tells_prompt = False
                    for told in deltas.prompt(prompt.token_ids, step, start.sampling.prompt_logprobs):
                        yield thinker_pb2.GenerateResponse(prompt_logprobs=told)
                yield thinker_pb2.GenerateResponse(delta=deltas.delta(step))
                if forwarder and deltas.has_calls:
                    forwarder.close()  # a named parser's calls may begin with another token
                summary.completion_tokens += len(step.token_ids)
                if step.finish_reason:
                    summary.finish_reason = deltas.finish_reason(step.finish_reason)
                    summary.cached_tokens, summary.reasoning_tokens = step.cached_tokens, deltas.reasoning_tokens
                    ended = step.finish_reason == "stop"
                    reusable = is_reusable(deltas.token_ids, checkpoint.special_ids, ended)
                    # a call that was forced is sampled without the markers that the template puts around it
                    summary.token_ids_reusable = schema is None and reusable
        if forwarder:
            forwarder.finish()
        call.set(cached_tokens=summary.cached_tokens, completion_tokens=summary.completion_tokens)
        summary.timings.CopyFrom(call.timings.to_message())
        yield thinker_pb2.GenerateResponse(summary=summary)

    def _writer(
        self, start: thinker_pb2.GenerateStart, prompt: Prompt, parser: ToolCallParser | NamedToolParser | None
    ) -> DeltaWriter:
        """What turns the answer's steps into messages."""
        checkpoint = self.engine.checkpoint
        top_logprobs = start.sampling.top_logprobs if start.sampling.HasField("top_logprobs") else None
        thinks = checkpoint.reasoning if not start.HasField("prompt") else None  # else it is all of it text
        thought = ThoughtParser(thinks, prompt.opens_thought) if thinks else None
        return DeltaWriter(checkpoint.tokenizer, top_logprobs, parser, thought)

    def _tool_parser(self, tools: list[dict[str, Any]], is_forced: bool) -> ToolCallParser | NamedToolParser | None:
        """What finds calls of `tools` in the answer. One that is forced is a JSON object, whatever the parser."""
        engine, checkpoint = self.engine, self.engine.checkpoint
        if tools and engine.tool_parser and not is_forced:
            return NamedToolParser(engine.tool_parser, checkpoint.tokenizer, tools)
        markers = checkpoint.tool_calls or (_ANY_MARKERS if is_forced else None)
        return ToolCallParser(markers, is_forced) if tools and markers else None

    async def Tokenize(
        self, request: thinker_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.TokenizeResponse:
        token_ids, tokens = [], []
        async with self._admitted(context):
            if request.messages:
                start = thinker_pb2.GenerateStart(messages=request.messages, tools=request.tools)
                start.chat_template_kwargs_json = request.chat_template_kwargs_json
                tools, _ = read_tools(start)
                conversation = read_conversation(start, tools, self._settings)
                token_ids = await self.preprocessor.tokenize(conversation, not request.no_generation_prompt)
            else:
                token_ids = await self.preprocessor.tokens(request.text, not request.no_special_tokens)
            tokens = await self.preprocessor.spelled(token_ids) if request.wants_tokens else []
        return thinker_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def Detokenize(
        self, request: thinker_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> thinker_pb2.DetokenizeResponse:
        text = ""
        async with self._admitted(context):
            text = await self.preprocessor.text(list(request.token_ids))
        return thinker_pb2.DetokenizeResponse(text=text)

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
        """The engine's adapters; what they are afterwards is in the stage's ServerInfo."""
        async with self._admitted(context):
            yield self.engine.adapters
            with self._stage.revising() as info:
                del info.thinker.loras[:]
                info.thinker.loras.extend(loras(self.engine.adapters))

    @asynccontextmanager
    async def _admitted(self, context: grpc.aio.ServicerContext) -> AsyncGenerator[None]:
        """A place of the stage's, for a call that has no use for the engine's steps; its errors are the call's."""
        try:
            with self._stage.admission.admit():
                yield
        except StageError as error:
            await abort(context, error)

    async def _prepare(
        self, conversation: Conversation, output: OutputStream | None
    ) -> tuple[Prompt, list[stream_pb2.RowSelection]]:
        """Preprocesses while the consumer of the output stream, if any, is on its way."""
        prompt = asyncio.ensure_future(self.preprocessor.prepare(conversation))
        if output is None:
            return await prompt, []
        selections = asyncio.ensure_future(output.subscription(self._settings.subscription_timeout_s))
        try:
            return await asyncio.gather(prompt, selections)
        finally:
            prompt.cancel()
            selections.cancel()


def loras(adapters: Adapters) -> list[server_info_pb2.Lora]:
    """The adapters, as ThinkerInfo has them."""
    return [server_info_pb2.Lora(name=name, digest=digest) for name, digest in adapters.digests.items()]


async def serve(stage: Stage, settings: ThinkerSettings) -> None:
    """Runs the stage until it is told to stop.

    Raises:
        Exception: the engine cannot start, or died.
    """
    servicer = ThinkerServicer(settings, stage)
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(servicer, stage.grpc)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        engine = await stage.load(ThinkerEngine.start(settings))
        stage.resources.push_async_callback(engine.close)
        preprocessor = Preprocessor(settings, engine)
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
            rows=[server_info_pb2.RowsInfo(name=name) for name in offered_rows(engine.row_kinds)],
            thinker=server_info_pb2.ThinkerInfo(
                max_context_tokens=engine.max_context_tokens,
                accept_hidden_layer=engine.checkpoint.accept_hidden_layer,
                input_modalities=list(engine.checkpoint.placeholders),
                loras=loras(engine.adapters),
                max_loras=settings.max_loras,
                kv_block_tokens=engine.kv_block_tokens,
                kv_blocks=engine.kv_blocks,
            ),
        )

    await stage.serve(start)


async def _read_media(conversation: Conversation, requests: AsyncIterator[thinker_pb2.GenerateRequest]) -> None:
    """Fills the files that are not in the start. Raises InvalidInput: the rest of one does not come."""
    for file in conversation.media:
        if file.missing_bytes:
            file.data = await read_bytes(file.field, file.missing_bytes, requests)
            file.missing_bytes = 0


async def _warm_up(engine: ThinkerEngine, preprocessor: Preprocessor) -> None:
    prompt = await preprocessor.prepare(Conversation([Message("user", ["Hello"])]))
    request = thinker_pb2.SamplingParameters(max_tokens=2, ignore_eos=True)
    params = sampling_params(request, engine.sampling_defaults, engine.checkpoint.vocab_size, None)
    async for _ in engine.generate("warm-up", prompt, params):
        pass


async def _end_with(engine: ThinkerEngine, stage: Stage) -> None:
    await engine.died()
    await asyncio.sleep(GRACE_S)
    stage.fatal(Unavailable("the thinker's engine died"))


def _mark(call: Call, step: Step) -> None:
    """Takes the engine's own times over: its clock is this host's monotonic one too."""
    call.timings.started = call.timings.started or step.scheduled or None
    call.timings.prefilled = call.timings.prefilled or step.first_token or None
    call.timings.mark_output()
