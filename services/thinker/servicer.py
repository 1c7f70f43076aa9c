"""quartet.v1.ThinkerService: messages in, engine calls, messages out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING

import grpc

from quartet.v1 import stream_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.messages import first_start
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Prompt
from services.thinker.engine import Step, ThinkerEngine
from services.thinker.family import ToolCallMarkers
from services.thinker.output import DeltaWriter, RowForwarder, offered_rows
from services.thinker.preprocess import Preprocessor
from services.thinker.request import read_conversation, read_tools, sampling_params
from services.thinker.tools import ToolCallParser

if TYPE_CHECKING:
    from vllm import SamplingParams

STAGE = "thinker"


class ThinkerServicer(thinker_pb2_grpc.ThinkerServiceServicer):
    """Serves requests with `engine`, which `bind` provides once it is loaded."""

    def __init__(self, settings: ThinkerSettings, admission: Admission, hub: StreamHub) -> None:
        self._settings = settings
        self._admission = admission
        self._hub = hub
        self._engine: ThinkerEngine
        self._preprocessor: Preprocessor

    def bind(self, engine: ThinkerEngine, preprocessor: Preprocessor) -> None:
        """Gives the servicer its engine; admission opens after that."""
        self._engine = engine
        self._preprocessor = preprocessor

    async def Generate(
        self, request_iterator: AsyncIterator[thinker_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[thinker_pb2.GenerateResponse]:
        start = await first_start(request_iterator, context)
        async with serve_call(STAGE, start.request_id, context, self._admission) as call:
            stream = nullcontext()
            if start.output_stream_id:
                stream = self._hub.open(start.output_stream_id, offered_rows(self._engine.row_kinds))
            with stream as output:
                async with aclosing(self._generate(start, request_iterator, call, output)) as responses:
                    async for response in responses:
                        yield response

    async def _generate(
        self,
        start: thinker_pb2.GenerateStart,
        requests: AsyncIterator[thinker_pb2.GenerateRequest],
        call: Call,
        output: OutputStream | None,
    ) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        choice, tools = read_tools(start)
        schema = choice.output_schema(tools)
        params = self._sampling_params(start, schema)
        offered = tools if choice.mode != "none" else []
        conversation = await read_conversation(start, offered, requests, self._settings)
        prompt, selections = await self._prepare(conversation, output)
        prompt_tokens = len(prompt.token_ids)
        call.set(prompt_tokens=prompt_tokens)
        yield thinker_pb2.GenerateResponse(
            prompt=thinker_pb2.PromptInfo(
                prompt_tokens=prompt_tokens, audio_tokens=prompt.audio_tokens, image_tokens=prompt.image_tokens
            )
        )
        markers = self._engine.checkpoint.tool_calls if choice.mode != "none" else None
        deltas = self._delta_writer(start, markers, forced=schema is not None)
        forwarder = None
        if output:
            opening_id = self._engine.checkpoint.token_id(markers.opening) if markers else None
            forwarder = RowForwarder(output, prompt, selections, opening_id)
            if schema is not None:
                forwarder.close()  # the answer is a call: there is nothing to speak
        subscription = forwarder.subscription() if forwarder else None
        summary = thinker_pb2.GenerateSummary(prompt_tokens=prompt_tokens)
        async with aclosing(self._engine.generate(start.request_id, prompt, params, subscription)) as steps:
            async for step in steps:
                if forwarder:
                    forwarder.add(step)
                _mark(call, step)
                yield thinker_pb2.GenerateResponse(delta=deltas.delta(step))
                summary.completion_tokens += len(step.token_ids)
                if step.finish_reason:
                    summary.finish_reason = deltas.finish_reason(step.finish_reason)
                    summary.cached_tokens = step.cached_tokens
        if forwarder:
            forwarder.finish()
        call.set(cached_tokens=summary.cached_tokens, completion_tokens=summary.completion_tokens)
        summary.timings.CopyFrom(call.timings.to_message())
        yield thinker_pb2.GenerateResponse(summary=summary)

    def _sampling_params(self, start: thinker_pb2.GenerateStart, output_schema: str | None) -> "SamplingParams":
        """vLLM's parameters for the request, checked by vLLM.

        Raises:
            InvalidInput: names the field.
        """
        engine = self._engine
        vocab_size = engine.checkpoint.vocab_size
        params = sampling_params(start.sampling, engine.sampling_defaults, vocab_size, output_schema)
        structure = start.sampling.WhichOneof("structure")
        engine.validate(params, f"sampling.{structure}" if structure else "sampling")
        return params

    def _delta_writer(
        self, start: thinker_pb2.GenerateStart, markers: ToolCallMarkers | None, forced: bool
    ) -> DeltaWriter:
        parser = ToolCallParser(markers, forced) if markers else None
        top_logprobs = start.sampling.top_logprobs if start.sampling.HasField("top_logprobs") else None
        return DeltaWriter(self._engine.checkpoint.tokenizer, top_logprobs, parser)

    async def _prepare(
        self, conversation: Conversation, output: OutputStream | None
    ) -> tuple[Prompt, list[stream_pb2.RowSelection]]:
        """Preprocesses while the consumer of the output stream, if any, is on its way."""
        prompt = asyncio.ensure_future(self._preprocessor.prepare(conversation))
        if output is None:
            return await prompt, []
        selections = asyncio.ensure_future(output.subscription(self._settings.subscription_timeout_s))
        try:
            return await asyncio.gather(prompt, selections)
        finally:
            prompt.cancel()
            selections.cancel()


def _mark(call: Call, step: Step) -> None:
    """Takes the engine's own times over: its clock is this host's monotonic one too."""
    call.timings.started = call.timings.started or step.scheduled or None
    call.timings.prefilled = call.timings.prefilled or step.first_token or None
    call.timings.mark_output()
