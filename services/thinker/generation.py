"""One call of the thinker: the request is checked, becomes a prompt, and is answered."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quartet.v1 import stream_pb2, thinker_pb2
from services.common.errors import InvalidInput
from services.common.rpc.call import Call
from services.common.sampling_limits import BACKGROUND_PRIORITY, WHOLE_VOCABULARY
from services.common.stream.output_stream import OutputStream
from services.thinker import beams, logprobs
from services.thinker.beams import Beam, BeamRun
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Prompt
from services.thinker.engine import Step, ThinkerEngine
from services.thinker.family import ToolCallMarkers
from services.thinker.output import DeltaWriter, RowForwarder
from services.thinker.preprocess import Preprocessor
from services.thinker.reasoning import ThoughtParser
from services.thinker.request import read_conversation, read_tools, refuse_transcription, sampling_params
from services.thinker.structure import Format, ToolChoice, calls_of
from services.thinker.template import is_reusable
from services.thinker.tools import NamedToolParser, ToolCallParser, calls_by

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

SUBSCRIPTION_TIMEOUT_S = 10.0  # longest wait for the consumer of an output stream
_BACKGROUND_PERIOD_S = 0.1
_ANY_MARKERS = ToolCallMarkers("<tool_call>", "</tool_call>")  # a forced call has none around it


@dataclass
class Generation:
    """One request. Its methods are called in the order in which they stand here.

    Attributes:
        output: where its rows go; None: nobody reads them.
        conversation: set by `refuse`.
    """

    engine: ThinkerEngine
    preprocessor: Preprocessor
    settings: ThinkerSettings
    start: thinker_pb2.GenerateStart
    output: OutputStream | None
    call: Call
    lora: "LoRARequest | None"
    conversation: Conversation = field(init=False)
    _tools: list[dict[str, Any]] = field(init=False)
    _schema: str | None = field(init=False)
    _prompt: Prompt = field(init=False)
    _selections: Sequence[stream_pb2.RowSelection] = field(init=False, default=())
    _params: "SamplingParams" = field(init=False)
    _summary: thinker_pb2.GenerateSummary = field(init=False, default_factory=thinker_pb2.GenerateSummary)

    async def refuse(self) -> None:
        """Raises InvalidInput, which names the field: the request cannot be served."""
        start, engine = self.start, self.engine
        if start.count_only and self.output is not None:
            raise InvalidInput("output_stream_id", "must be unset with count_only: there is nothing to stream")
        refuse_transcription(start, engine.speech_prompts is not None, engine.checkpoint.only_transcribes)
        logprobs.refuse(start.sampling, self.settings)
        if start.sampling.HasField("thinking_token_budget") and engine.checkpoint.reasoning is None:
            raise InvalidInput("sampling.thinking_token_budget", "this model does not think; leave it out")
        if start.prompt.opens_thought and engine.checkpoint.reasoning is None:
            raise InvalidInput("prompt.opens_thought", "this model does not think; leave it out")
        logprobs.refuse_many(start.sampling, 0, engine.checkpoint.vocab_size)
        if start.HasField("beams"):
            beams.refuse(start)
        self._tools, self._schema = read_tools(start)
        if self._tools and self._schema is None and not (engine.checkpoint.tool_calls or engine.tool_parser):
            how = "its calls are not known here: set the thinker's --tool-call-parser"
            takes = f"takes tools, but {how}" if engine.checkpoint.takes_tools else "has no tools"
            raise InvalidInput("tools[0]", f"this model {takes}; leave them out")
        vocab_size = engine.checkpoint.vocab_size
        sampling = start.sampling
        self._params = sampling_params(sampling, engine.sampling_defaults, vocab_size, self._schema, self._calls())
        if start.HasField("beams"):
            self._params = beams.params_of(start)
        if engine.speech_prompts is not None and start.HasField("transcription"):
            engine.speech_prompts.suppress(self._params)
        kind = sampling.WhichOneof("structure")
        structure = f"sampling.{kind}" if kind else "sampling"
        await engine.validate(self._params, structure if self._schema is None else "tools", self._parameters())
        self.conversation = read_conversation(start, self._tools, self.settings)

    async def prepare(self) -> thinker_pb2.GenerateResponse:
        """Makes the prompt, while the consumer of the output stream subscribes."""
        prompt = asyncio.ensure_future(self.preprocessor.prepare(self.conversation))
        if self.output is None:
            self._prompt = await prompt
        else:
            selections = asyncio.ensure_future(self.output.subscription(SUBSCRIPTION_TIMEOUT_S))
            try:
                self._prompt, self._selections = await asyncio.gather(prompt, selections)
            finally:
                prompt.cancel()
                selections.cancel()
        self._summary.prompt_tokens = prompt_tokens = len(self._prompt.token_ids)
        self.call.set(prompt_tokens=prompt_tokens)
        limits = self.start.sampling, prompt_tokens, self.engine.checkpoint.vocab_size
        logprobs.refuse_many(*limits)
        if (chosen := logprobs.chosen_of(*limits)) is not None:
            chosen.ask(self._params, self.engine.runner_is_v2)
        info = thinker_pb2.PromptInfo(
            prompt_tokens=prompt_tokens,
            audio_tokens=self._prompt.audio_tokens,
            image_tokens=self._prompt.image_tokens,
            opens_thought=self._prompt.opens_thought,
        )
        if self.start.wants_prompt_token_ids:
            info.token_ids.extend(self._prompt.token_ids)
            for kind, begin, length in self._prompt.placeholders:
                info.media.add(kind=f"MEDIA_KIND_{kind.upper()}", offset=begin, length=length)
        return thinker_pb2.GenerateResponse(prompt=info)

    async def answer(self) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        """The prompt's log-probabilities, if they are requested, then a delta for each step; in the background one for
        several, since to pass each on would take time from others."""
        start, prompt = self.start, self._prompt
        deltas, forwarder = self._writer(), self._forwarder()
        subscription = forwarder.subscription if forwarder else None
        wants_prompt = start.sampling.HasField("prompt_logprobs")
        answer = self.engine.generate(
            start.request_id, prompt, self._params, subscription, priority=start.priority, lora=self.lora
        )
        async with aclosing(answer) as steps:
            async for step in steps:
                if forwarder:
                    forwarder.add(step)
                self._mark(step)
                if wants_prompt:
                    wants_prompt = False
                    parts = deltas.prompt(prompt.token_ids, step, start.sampling.prompt_logprobs)
                    for part in parts if start.sampling.prompt_logprobs >= 0 else await asyncio.to_thread(list, parts):
                        yield thinker_pb2.GenerateResponse(prompt_logprobs=part)
                if step.prompt_scores is not None:
                    columns, scores = step.prompt_scores.shape[1], step.prompt_scores.ravel()
                    message = thinker_pb2.PromptScores(columns=columns, logprobs=scores)
                    yield thinker_pb2.GenerateResponse(prompt_scores=message)
                is_whole = start.sampling.top_logprobs == WHOLE_VOCABULARY
                delta = await asyncio.to_thread(deltas.delta, step) if is_whole else deltas.delta(step)
                yield thinker_pb2.GenerateResponse(delta=delta)
                if forwarder and deltas.has_calls:
                    forwarder.close()  # a named parser's calls may begin with another token
                self._count(step, deltas)
                if start.priority >= BACKGROUND_PRIORITY and step.finish_reason is None:
                    await asyncio.sleep(_BACKGROUND_PERIOD_S)  # vLLM gathers what comes meanwhile
        if forwarder:
            forwarder.finish()
        summary = self._summary
        self.call.set(cached_tokens=summary.cached_tokens, completion_tokens=summary.completion_tokens)

    async def beams(self) -> AsyncGenerator[thinker_pb2.GenerateResponse]:
        """The beams, best first."""
        run = BeamRun(self.engine, self.start, self._prompt, self._params, self.lora)
        found = await run.beams()
        if run.first is not None:
            self._mark(run.first)
        for beam in found:
            message = await asyncio.to_thread(self._beam, beam)
            message.summary.cached_tokens = run.first.cached_tokens if run.first else 0
            self._summary.completion_tokens += message.summary.completion_tokens
            yield thinker_pb2.GenerateResponse(beam=message)
        self.call.set(completion_tokens=self._summary.completion_tokens)

    def _beam(self, beam: Beam) -> thinker_pb2.GeneratedBeam:
        sampling, deltas = self.start.sampling, self._writer()
        reason, token_ids = "stop" if beam.has_ended else "length", beam.token_ids
        skips = not sampling.HasField("skip_special_tokens") or sampling.skip_special_tokens
        text = self.engine.checkpoint.tokenizer.decode(token_ids[: beam.length], skip_special_tokens=skips)
        step = Step(text, token_ids, [each.by_id for each in beam.path()], reason, 0, 0.0, 0.0)
        return thinker_pb2.GeneratedBeam(
            delta=deltas.delta(step),
            summary=thinker_pb2.GenerateSummary(
                finish_reason=deltas.finish_reason(reason),
                prompt_tokens=self._summary.prompt_tokens,
                completion_tokens=len(token_ids),
                reasoning_tokens=deltas.reasoning_tokens,
            ),
        )

    def summary(self) -> thinker_pb2.GenerateResponse:
        """The last message."""
        self._summary.timings.CopyFrom(self.call.timings.to_message())
        return thinker_pb2.GenerateResponse(summary=self._summary)

    def _writer(self) -> DeltaWriter:
        start, checkpoint = self.start, self.engine.checkpoint
        parser = self._tool_parser()
        if isinstance(parser, NamedToolParser) and parser.reads_special_tokens:
            self._params.skip_special_tokens = False
        top_logprobs = start.sampling.top_logprobs if start.sampling.HasField("top_logprobs") else None
        thinks = checkpoint.reasoning if not start.HasField("prompt") else None  # else it is all of it text
        thought = ThoughtParser(thinks, self._prompt.opens_thought) if thinks else None
        chooses = bool(start.sampling.logprob_token_ids)
        prompts = self.engine.speech_prompts if start.HasField("transcription") else None
        clean = prompts.cleaner() if prompts else None
        return DeltaWriter(checkpoint.tokenizer, top_logprobs, parser, thought, chooses, clean)

    def _parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas of the tools that may be called, by their fields."""
        only = self.start.tool_choice.name if self.start.tool_choice.mode == ToolChoice.MODE_FUNCTION else None
        functions = [tool["function"] for tool in self._tools]
        return {
            f"tools[{i}].parameters_json": {"type": "object", **(function.get("parameters") or {})}
            for i, function in enumerate(functions)
            if only in (None, function["name"])
        }

    def _calls(self) -> Format | None:
        """How the tools are called instead of an answer that has a structure."""
        engine, kind = self.engine, self.start.sampling.WhichOneof("structure")
        if not self._tools or self._schema is not None or kind is None:
            return None
        if engine.tool_parser:
            return calls_by(engine.tool_parser, engine.checkpoint.tokenizer, self._tools)
        assert engine.checkpoint.tool_calls is not None, "a model without tools was given some"
        return calls_of(self._tools, engine.checkpoint.tool_calls)

    def _tool_parser(self) -> ToolCallParser | NamedToolParser | None:
        """What finds calls of the tools in the answer. A forced one is a JSON object, whatever the parser."""
        engine, checkpoint, is_forced = self.engine, self.engine.checkpoint, self._schema is not None
        if self._tools and engine.tool_parser and not is_forced:
            return NamedToolParser(engine.tool_parser, checkpoint.tokenizer, self._tools)
        markers = checkpoint.tool_calls or (_ANY_MARKERS if is_forced else None)
        names = {tool["function"]["name"] for tool in self._tools}
        return ToolCallParser(markers, names, is_forced) if self._tools and markers else None

    def _forwarder(self) -> RowForwarder | None:
        if self.output is None:
            return None
        checkpoint = self.engine.checkpoint
        markers = checkpoint.tool_calls if self._tools else None
        opening_id = checkpoint.token_id(markers.opening) if markers else None
        forwarder = RowForwarder(self.output, self._prompt, self._selections, opening_id)
        if self._schema is not None:
            forwarder.close()  # the answer is a call: there is nothing to speak
        return forwarder

    def _mark(self, step: Step) -> None:
        """Takes over the engine's times, which are this host's monotonic clock's."""
        timings = self.call.timings
        timings.started = timings.started or step.scheduled or None
        timings.prefilled = timings.prefilled or step.first_token or None
        timings.mark_output()

    def _count(self, step: Step, deltas: DeltaWriter) -> None:
        summary = self._summary
        summary.completion_tokens += len(step.token_ids)
        if step.finish_reason:
            summary.finish_reason = deltas.finish_reason(step.finish_reason)
            summary.cached_tokens, summary.reasoning_tokens = step.cached_tokens, deltas.reasoning_tokens
            summary.stop = step.stop
            special_ids, ended = self.engine.checkpoint.special_ids, step.finish_reason == "stop"
            # a call that was forced is sampled without the markers that the template puts around it
            is_whole = self._schema is None and not self.start.continue_final_message
            summary.token_ids_reusable = is_whole and is_reusable(deltas.token_ids, special_ids, ended)
