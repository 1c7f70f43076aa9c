"""A thinker's engine with its preprocessor in a test, without a service around them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.thinker import environment
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation
from tests.support.scripted.preprocessing import decoders


@dataclass
class Written:
    """An answer.

    Attributes:
        prompt: what it answers, as the preprocessor makes it.
        scores: log-probabilities of `ids`, if they were wanted.
        reason: why it ended.
    """

    prompt: Any
    ids: list[int] = field(default_factory=list)
    scores: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    reason: str | None = None


@dataclass
class Thinking:
    """An engine (real processes) on small memory, and its preprocessor."""

    settings: ThinkerSettings
    engine: Any
    preprocessor: Any

    async def write(self, conversation: Conversation, **sampling: Any) -> Written:
        """Greedy, unless `sampling` says otherwise."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options: dict[str, Any] = {"temperature": 0} | sampling
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **options)
        written, scores = Written(await self.preprocessor.prepare(conversation)), list[float]()
        async for step in self.engine.generate("r", written.prompt, params):
            written.ids += step.token_ids
            scores += [each[i].logprob for i, each in zip(step.token_ids, step.logprobs, strict=False)]
            written.reason = step.finish_reason
        written.scores = torch.tensor(scores)
        return written


@asynccontextmanager
async def thinking(checkpoint: Path, max_batched_tokens: int) -> AsyncIterator[Thinking]:
    """`max_batched_tokens`: of a step; longer prompts are read in pieces."""
    settings = ThinkerSettings(
        model=str(checkpoint),
        dtype="float32",
        block_size=32,
        kv_cache_bytes=16 << 20,
        max_running_requests=8,
        max_context_tokens=1024,
        max_batched_tokens=max_batched_tokens,
    )
    environment.configure(settings)
    from services.thinker.engine import ThinkerEngine
    from services.thinker.preprocess import Preprocessor

    engine = await ThinkerEngine.start(settings)
    preprocessor = Preprocessor(settings, engine, decoders())
    yield Thinking(settings, engine, preprocessor)
    await engine.close()
    preprocessor.close()
