"""quartet.v1.ThinkerService: messages in, engine calls, messages out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, nullcontext

import grpc

from quartet.v1 import stream_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.messages import first_start
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.thinker.capture import OutputCapture, offered_rows
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation
from services.thinker.deltas import DeltaWriter
from services.thinker.engine import Step, ThinkerEngine
from services.thinker.preprocess import Preprocessor
from services.thinker.prompt import Prompt
from services.thinker.request import read_conversation, read_tools, tool_choice
from services.thinker.sampling import sampling_params
from services.thinker.tools import OPENING, ToolCallParser

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
                stream = self._hub.open(start.output_stream_id, offered_rows(self._engine.kept_layers))
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
        engine, checkpoint = self._engine, self._engine.checkpoint
        choice = tool_choice(start)
        schema = choice.output_schema(read_tools(start))
        params = sampling_params(start.sampling, engine.sampling_defaults, checkpoint.vocab_size, schema)
        structure = start.sampling.WhichOneof("structure")
        engine.validate(params, f"sampling.{structure}" if structure else "sampling")
        conversation = await read_conversation(start, requests, self._settings)
        prompt, selections = await self._prepare(conversation, output)
        call.set(prompt_tokens=len(prompt.token_ids))
        yield thinker_pb2.GenerateResponse(
            prompt=thinker_pb2.PromptInfo(
                prompt_tokens=len(prompt.token_ids),
                audio_tokens=prompt.audio_tokens,
                image_tokens=prompt.image_tokens,
            )
        )
        capture = OutputCapture(output, prompt, selections) if output else None
        if capture and schema is not None:
            capture.close()  # the answer is a call: there is nothing to speak
        parser = ToolCallParser(forced=schema is not None) if choice.mode != "none" else None
        top_logprobs = start.sampling.top_logprobs if start.sampling.HasField("top_logprobs") else None
        deltas = DeltaWriter(checkpoint.tokenizer, top_logprobs, parser)
        opening = checkpoint.token_id(OPENING) if parser else None
        completion_tokens = 0
        tap = capture.tap() if capture else None
        async with aclosing(engine.generate(start.request_id, prompt, params, tap)) as steps:
            async for step in steps:
                completion_tokens += len(step.token_ids)
                if capture:
                    _forward(capture, step, opening)
                _mark(call, step)
                yield thinker_pb2.GenerateResponse(delta=deltas.delta(step))
                if step.finish_reason:
                    summary = thinker_pb2.GenerateSummary(
                        finish_reason=deltas.finish_reason(step.finish_reason),
                        prompt_tokens=len(prompt.token_ids),
                        cached_tokens=step.cached_tokens,
                        completion_tokens=completion_tokens,
                    )
        if capture:
            capture.finish()
        call.set(cached_tokens=summary.cached_tokens, completion_tokens=completion_tokens)
        summary.timings.CopyFrom(call.timings.to_message())
        yield thinker_pb2.GenerateResponse(summary=summary)

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


def _forward(capture: OutputCapture, step: Step, opening: int | None) -> None:
    """Passes the step's tokens to the talker: up to a tool call, and without the token that ended the answer (an
    end-of-sequence or stop token, or the one that completed a stop string)."""
    token_ids = step.token_ids[:-1] if step.finish_reason == "stop" else step.token_ids
    if opening in token_ids:
        capture.add_tokens(token_ids[: token_ids.index(opening)])
        capture.close()
    else:
        capture.add_tokens(token_ids)


def _mark(call: Call, step: Step) -> None:
    """Takes the engine's own times over: its clock is this host's monotonic one too."""
    call.timings.started = call.timings.started or step.scheduled or None
    call.timings.prefilled = call.timings.prefilled or step.first_token or None
    call.timings.mark_output()
