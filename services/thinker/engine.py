"""vLLM's AsyncLLM, and the rows of hidden states beside its outputs."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from services.common.engine.device import log_choices
from services.common.errors import InternalError, InvalidInput, StageError, Unavailable
from services.common.stream.rows import TOKEN_IDS, Rows
from services.registry import read_config
from services.thinker import device, execution, parsers
from services.thinker.compiling import GrammarChecks
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Prompt
from services.thinker.environment import scratch_dir, sockets_dir
from services.thinker.execution import (
    compute_dtype,
    engine_args,
    has_amx,
    make_room_for_media,
    refused_on_cpu,
    too_large_medium,
)
from services.thinker.family import ThinkerCheckpoint, load_checkpoint
from services.thinker.llm import shut_down, started
from services.thinker.lora import Adapters
from services.thinker.metrics import EngineStats
from services.thinker.plugin.expected import Expected
from services.thinker.plugin.row_channel import RowReceiver
from services.thinker.plugin.rows import Range, RowRequest
from services.thinker.recorder import VllmRecorder
from services.thinker.schemas import Schema
from services.thinker.speech_prompts import SpeechPrompts

if TYPE_CHECKING:
    import numpy as np
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.tool_parsers import ToolParser
    from vllm.v1.engine.async_llm import AsyncLLM

HEALTH_PERIOD_S = 0.2


@dataclass(frozen=True)
class Step:
    """What one engine step gave a request, or several steps if the caller was slower than the engine.

    Attributes:
        text: new text; what may be the start of a stop string is held back.
        token_ids: new ones, an end-of-sequence token included.
        logprobs: for each of them, by token id: its own, and those of the alternatives; empty unless requested.
        finish_reason: "stop" or "length" in the last step, else None.
        cached_tokens: prompt tokens whose KV blocks the prefix cache had.
        scheduled, first_token: when the engine began with the request, and sampled the first token: seconds of
            time.monotonic().
        prompt_logprobs: as `logprobs`, of the prompt's tokens but the first, in the step of the first new token.
        stop: the stop string that ended the answer; "": none did.
        prompt_scores: (rows, ids of a row) log-probabilities of `Chosen`, in the step of the first new token.
    """

    text: str
    token_ids: list[int]
    logprobs: "Sequence[Mapping[int, Logprob]]"
    finish_reason: str | None
    cached_tokens: int
    scheduled: float
    first_token: float
    prompt_logprobs: "Sequence[Mapping[int, Logprob]]" = ()
    stop: str = ""
    prompt_scores: "np.ndarray | None" = None


@dataclass(frozen=True)
class RowSubscription:
    """Wanted ranges of positions by name of the rows; `sink` takes each piece on the event loop's thread."""

    ranges: dict[str, list[Range]]
    sink: Callable[[Rows], None]


class ThinkerEngine:
    """Runs the thinker. Make it with `start`; for one event loop.

    Attributes:
        rows: receives those that requests ask for.
        offered_rows: names of the rows that a stream may have.
        dtype: that the model computes in, e.g. "bfloat16".
        device: kind of device, e.g. "cuda".
        kv_blocks: of `kv_block_tokens` tokens each.
        sampling_defaults: the checkpoint's generation_config, by vLLM's names.
        end_ids: tokens that end an answer.
        renderer: vLLM's preprocessor of prompts.
        tool_parser: the one that the settings name, or the checkpoint, if any.
        runner_is_v2: whether vLLM's model runner is V2.
        speech_prompts: those by which the model writes down speech; None: it has none of its own.
        expected: by it, requests of the background wait for one whose prompt is still made.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        checkpoint: ThinkerCheckpoint,
        rows: RowReceiver,
        resources: contextlib.AsyncExitStack,
        adapters: Adapters,
        tool_parser: "type[ToolParser] | None",
        grammars: GrammarChecks,
        expected: Expected,
    ) -> None:
        self.adapters, self.tool_parser, self.expected = adapters, tool_parser, expected
        self.checkpoint = checkpoint
        self.rows = rows
        self.row_kinds = checkpoint.row_kinds()
        self.offered_rows = [TOKEN_IDS, *(kind.name for kind in self.row_kinds)]
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.device: str = llm.vllm_config.device_config.device_type
        self.max_context_tokens: int = llm.model_config.max_model_len
        self.kv_block_tokens: int = llm.vllm_config.cache_config.block_size
        self.kv_blocks: int = llm.vllm_config.cache_config.num_gpu_blocks or 0
        self.sampling_defaults: dict[str, Any] = llm.model_config.get_diff_sampling_param()
        self.renderer: Any = llm.renderer
        ends = llm.model_config.try_get_generation_config().get("eos_token_id") or []
        self.end_ids = frozenset([*([ends] if isinstance(ends, int) else ends), checkpoint.tokenizer.eos_token_id])
        self.runner_is_v2: bool = llm.vllm_config.use_v2_model_runner
        self.recorder = VllmRecorder(llm)
        self.speech_prompts = SpeechPrompts(llm, checkpoint) if checkpoint.transcribes else None
        self._llm, self._grammars = llm, grammars
        self._resources = resources
        self._keys = itertools.count()

    @classmethod
    async def start(cls, settings: ThinkerSettings) -> Self:
        """Loads the model; the event loop stays free meanwhile.

        Raises:
            ValueError: the settings cannot run on this device, name an unknown parser of tool calls or thoughts, or
                vLLM's process failed, with its error.
            Exception: what vLLM raises when it cannot load or does not fit.
        """
        checkpoint = await asyncio.to_thread(load_checkpoint, settings.model)
        async with contextlib.AsyncExitStack() as stack:
            scratch = stack.enter_context(scratch_dir())
            checkpoint, tool_parser = await asyncio.to_thread(parsers.choose, settings, checkpoint)
            rows = RowReceiver(sockets_dir())
            stack.push_async_callback(rows.close)
            llm = await started(partial(_load, settings, checkpoint, rows.address), scratch)
            adapters = Adapters(llm, settings, checkpoint.folder)
            grammars = GrammarChecks(checkpoint.folder, llm.model_config.get_vocab_size())
            stack.callback(grammars.close)
            grammars.start_later()
            engine = cls(llm, checkpoint, rows, stack.pop_all(), adapters, tool_parser, grammars, Expected(scratch))
        try:
            await adapters.load_named()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def validate(
        self, params: "SamplingParams", field: str = "sampling", schemas: Mapping[str, Schema] = MappingProxyType({})
    ) -> None:
        """Checks a request's parameters before there is a prompt. Cancelling ends a grammar's compilation.

        Args:
            field: what structures the output, if something does, else "sampling".
            schemas: those that the structure is made of, by their fields.

        Raises:
            InvalidInput: vLLM refuses the parameters, or the structure cannot be used (see `GrammarChecks`). Names one
                of these fields.
        """
        config = self._llm.vllm_config
        try:
            params.verify(config.model_config, config.speculative_config, None, self._llm.tokenizer)
        except Exception as error:  # vLLM's own kinds
            raise InvalidInput("sampling", str(error)) from error
        if params.structured_outputs is not None:
            await self._grammars.check(params.structured_outputs, field, schemas)
            params.structured_outputs._backend = "xgrammar"
        # vLLM verifies what it is given, too: that would compile the grammar once more, on the event loop.
        params.verify = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        params: "SamplingParams",
        subscription: RowSubscription | None = None,
        *,
        priority: int = 0,
        lora: "LoRARequest | None" = None,
    ) -> AsyncGenerator[Step]:
        """Generates one answer. Closing the iterator aborts the request and frees its KV blocks.

        With a `subscription`, rows may arrive before and after their step. When the iterator ends by itself, the rows
        of all positions have arrived but that of the last token, which was never fed.

        Args:
            request_id: for the log.
            priority: the lower goes first.
            lora: an adapter in use (see `Adapters.use`).

        Raises:
            InvalidInput: vLLM refuses the parameters.
            Unavailable: the engine died.
            InternalError: the engine failed at this request.
        """
        options: dict[str, Any] = {"priority": priority, "lora_request": lora}
        if self.checkpoint.reasoning:  # a structure is that of what follows the thought
            options["reasoning_ended"] = not prompt.opens_thought
        steps = _steps(self._llm.generate(prompt.engine_input, params, request_id, **options), request_id)
        if subscription is None:
            async for step in steps:
                yield step
            return
        rows = RowRequest(next(self._keys), subscription.ranges)
        params.extra_args = (params.extra_args or {}) | rows.to_extra_args()
        with self.rows.deliver(rows.key, subscription.sink) as delivery:
            computed = len(prompt.token_ids) - 1
            async for step in steps:
                computed += len(step.token_ids)
                yield step
            await delivery.wait(sum(b - a for _, (a, b) in rows.between(0, computed)))

    async def died(self) -> None:
        """Returns when the engine is dead, or receives no rows any more."""
        while not (self._llm.errored or self.rows.failed):  # noqa: ASYNC110  vLLM has no event for it
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def close(self) -> None:
        """Ends the engine's processes."""
        await shut_down(self._llm)
        await self._resources.aclose()


def _load(settings: ThinkerSettings, checkpoint: ThinkerCheckpoint, row_address: str) -> "AsyncLLM":
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM's defaults are by context; without one, a step has a quarter of the tokens that a large GPU takes
    context = UsageContext.OPENAI_API_SERVER
    accelerator = device.accelerator()
    dtype = compute_dtype(settings, checkpoint)
    choices = execution.choices(settings, accelerator, dtype)
    log_choices(choices)
    for choice in choices:
        if choice.fatal:
            raise ValueError(f"{choice.part}: {choice.reason}")
    folder = checkpoint.folder
    if accelerator is None and (reason := refused_on_cpu(read_config(folder), folder, dtype, has_amx())):
        raise ValueError(reason)
    config = engine_args(settings, checkpoint, row_address, accelerator).create_engine_config(context)
    if accelerator is None:
        make_room_for_media(config)
    loggers = [EngineStats]
    return AsyncLLM.from_vllm_config(config, usage_context=context, stat_loggers=loggers)  # pyright: ignore[reportArgumentType]


async def _steps(outputs: "AsyncGenerator[RequestOutput]", request_id: str) -> AsyncGenerator[Step]:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with aclosing(outputs):
            async for output in outputs:
                yield _step(output)
    except VLLMClientError as error:
        raise too_large_medium(error) or InvalidInput("sampling", str(error)) from error
    except EngineDeadError:
        raise Unavailable("the thinker's engine died; the stage restarts") from None
    except StageError:
        raise
    except Exception as error:
        raise InternalError(f"the thinker's engine failed at request {request_id}") from error


def _step(output: "RequestOutput") -> Step:
    (completion,) = output.outputs
    metrics = output.metrics
    if completion.finish_reason not in (None, "stop", "length"):
        raise InternalError(f"the engine ended the request: {completion.finish_reason}")
    return Step(
        text=completion.text,
        token_ids=list(completion.token_ids),
        logprobs=completion.logprobs or (),  # pyright: ignore[reportArgumentType]  flat only where that is requested
        finish_reason=completion.finish_reason,
        cached_tokens=output.num_cached_tokens or 0,
        scheduled=metrics.scheduled_ts if metrics else 0.0,
        first_token=metrics.first_token_ts if metrics else 0.0,
        prompt_logprobs=[by_id for by_id in output.prompt_logprobs or () if by_id is not None],
        stop=completion.stop_reason if isinstance(completion.stop_reason, str) else "",
        prompt_scores=output.prompt_token_id_logprobs,
    )
