"""vLLM's pooling engine: prompts in, embeddings or scores out."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from services.common.errors import InternalError, InvalidInput, StageError, Unavailable
from services.embedder.checkpoint import EmbedderCheckpoint, load_checkpoint
from services.embedder.config import EmbedderSettings
from services.embedder.metrics import INPUTS, TOKENS, PoolingStats
from services.embedder.texts import Prompt
from services.thinker import device
from services.thinker.environment import scratch_dir
from services.thinker.llm import shut_down, started
from services.thinker.recorder import VllmRecorder, profiler_config

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, PoolingParams
    from vllm.v1.engine.async_llm import AsyncLLM

HEALTH_PERIOD_S = 0.2
_KV_CACHE_BYTES_ON_CPU = 256 * 1024**2
_POOLINGS = {"cls": "CLS", "last": "LAST", "mean": "MEAN"}


class EmbedderEngine:
    """Runs the embedder. Make it with `start`; for one event loop.

    Attributes:
        checkpoint: what it serves.
        dtype: that the model computes in, e.g. "float32".
        device: kind of device, e.g. "cuda".
        dimensions: length of an embedding.
        max_input_tokens: longest prompt.
        vocab_size: of the model.
        lowercase: whether the checkpoint has texts made lower case.
        pooling: "cls", "last" or "mean".
        normalizes: whether embeddings have length 1.
        shorter: lengths that a request may ask for; (): any; None: no other.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        checkpoint: EmbedderCheckpoint,
        settings: EmbedderSettings,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        config: Any = llm.model_config
        self.checkpoint = checkpoint
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.device: str = llm.vllm_config.device_config.device_type
        self.dimensions: int = config.embedding_size
        self.max_input_tokens: int = min(config.max_model_len, checkpoint.positions or config.max_model_len)
        self.vocab_size: int = config.get_vocab_size()
        self.lowercase = bool((config.encoder_config or {}).get("do_lower_case"))
        self.pooling: str = config.pooler_config.get_seq_pooling_type().lower()
        self.normalizes = config.pooler_config.use_activation is not False
        self.shorter: Sequence[int] | None = None
        if config.is_matryoshka:
            self.shorter = tuple(config.matryoshka_dimensions or ())
        self.recorder = VllmRecorder(llm)
        self._llm, self._resources = llm, resources
        self._at_once = settings.max_batch_inputs
        self._keys = itertools.count()

    @classmethod
    async def start(cls, settings: EmbedderSettings) -> Self:
        """Loads the model; the event loop stays free meanwhile.

        Raises:
            ValueError: the settings cannot run on this device, the checkpoint is no embedder, or vLLM's process failed,
                with its error.
            Exception: what vLLM raises when it cannot load or does not fit.
        """
        checkpoint = await asyncio.to_thread(load_checkpoint, settings)
        async with contextlib.AsyncExitStack() as stack:
            scratch = stack.enter_context(scratch_dir())
            llm = await started(partial(_load, settings, checkpoint), scratch)
            resources = stack.pop_all()
        return cls(llm, checkpoint, settings, resources)

    async def run(
        self, request_id: str, prompts: Sequence[Prompt], dimensions: int | None = None, priority: int = 0
    ) -> AsyncGenerator[tuple[int, np.ndarray]]:
        """(index of a prompt, (dimensions) or (1) float32), in the order in which they are ready. Closing the iterator
        aborts the rest. The engine has at most `max_batch_inputs` prompts of a request at a time: a request of
        thousands stops nobody.

        Args:
            dimensions: of embeddings; None: all.

        Raises:
            InvalidInput: vLLM refuses the parameters.
            Unavailable: the engine died.
            InternalError: the engine failed at this request.
        """
        ready: asyncio.Queue[tuple[int, np.ndarray] | StageError] = asyncio.Queue()
        left = iter(enumerate(prompts))

        async def work() -> None:
            try:
                for index, prompt in left:
                    ready.put_nowait((index, await self._pool(request_id, prompt, dimensions, priority)))
            except StageError as error:
                ready.put_nowait(error)

        workers = [asyncio.create_task(work()) for _ in range(min(self._at_once, len(prompts)))]
        try:
            for _ in prompts:
                if isinstance(result := await ready.get(), StageError):
                    raise result
                yield result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _pool(self, request_id: str, prompt: Prompt, dimensions: int | None, priority: int) -> np.ndarray:
        """Cancelling aborts it in the engine."""
        key = f"{request_id}-{next(self._keys)}"
        with _engine_errors(request_id):
            given: Any = {"prompt_token_ids": list(prompt.token_ids)}
            engine_input = await self._llm.renderer.process_for_engine_async(given, time.time())
            outputs = self._llm.encode(engine_input, self._params(prompt, dimensions), key, priority=priority)
            (output,) = [each async for each in outputs]
            if output.error is not None:
                raise InternalError(f"the engine ended an input of request {request_id} without a result")
        INPUTS.inc()
        TOKENS.inc(len(prompt.token_ids))
        return output.outputs.data.float().numpy()

    def _params(self, prompt: Prompt, dimensions: int | None) -> "PoolingParams":
        from vllm import PoolingParams

        if not self.checkpoint.scores:
            return PoolingParams(task="embed", dimensions=dimensions)
        extra = None if prompt.second_at is None else {"compressed_token_type_ids": prompt.second_at}
        return PoolingParams(task="classify", extra_kwargs=extra)

    async def died(self) -> None:
        """Returns when the engine is dead."""
        while not self._llm.errored:  # noqa: ASYNC110  vLLM has no event for it
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def close(self) -> None:
        """Ends the engine's processes."""
        await shut_down(self._llm)
        await self._resources.aclose()


@contextlib.contextmanager
def _engine_errors(request_id: str) -> Iterator[None]:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except VLLMClientError as error:
        raise InvalidInput("dimensions", str(error)) from error
    except EngineDeadError:
        raise Unavailable("the embedder's engine died; the stage restarts") from None
    except StageError:
        raise
    except Exception as error:
        raise InternalError(f"the embedder's engine failed at request {request_id}") from error


def _load(settings: EmbedderSettings, checkpoint: EmbedderCheckpoint) -> "AsyncLLM":
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        engine_args(settings, checkpoint, on_cpu=device.accelerator() is None),
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[PoolingStats],  # pyright: ignore[reportArgumentType]
    )


def engine_args(settings: EmbedderSettings, checkpoint: EmbedderCheckpoint, *, on_cpu: bool) -> "AsyncEngineArgs":
    """Arguments for AsyncLLM."""
    from vllm import AsyncEngineArgs
    from vllm.config import PoolerConfig

    from services.thinker.plugin.recording import OneProcess, Processes

    pooling: Any = _POOLINGS.get(settings.pooling)
    return AsyncEngineArgs(
        model=str(checkpoint.folder),
        served_model_name=settings.model_name,
        runner="pooling",
        convert="classify" if checkpoint.scores else "embed",
        dtype=checkpoint.dtype if settings.dtype == "auto" else settings.dtype,  # type: ignore[arg-type]
        max_model_len=settings.max_input_tokens,  # pyright: ignore[reportArgumentType]  None: the model's
        max_num_seqs=settings.max_batch_inputs,
        max_num_batched_tokens=settings.max_batched_tokens,
        kv_cache_memory_bytes=settings.kv_cache_bytes or (_KV_CACHE_BYTES_ON_CPU if on_cpu else None),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend=OneProcess if settings.tensor_parallel_size == 1 else Processes,
        enforce_eager=settings.compile == "off" or (settings.compile == "auto" and on_cpu),
        pooler_config=PoolerConfig(seq_pooling_type=pooling) if pooling else None,
        hf_overrides={"is_matryoshka": True} if settings.matryoshka else {},
        use_tqdm_on_load=False,  # a bar is no log line
        profiler_config=profiler_config(),
        scheduling_policy="priority",  # of equal priorities the one that came first, as without
    )
