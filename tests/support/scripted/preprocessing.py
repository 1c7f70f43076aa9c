"""A thinker's preprocessor, without an engine behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from services.thinker.config import ThinkerSettings
from services.thinker.family import ThinkerCheckpoint
from services.thinker.preprocess import Preprocessor


class _Renderer:
    """Gives back what vLLM would get."""

    async def process_for_engine_async(self, prompt: Any, _: float) -> Any:
        return prompt


@contextmanager
def preprocessor_of(checkpoint: ThinkerCheckpoint, max_context_tokens: int) -> Iterator[Preprocessor]:
    """It has one thread of each kind."""
    engine: Any = SimpleNamespace(checkpoint=checkpoint, max_context_tokens=max_context_tokens, renderer=_Renderer())
    preprocessor = Preprocessor(ThinkerSettings(model="unused", preprocessing_threads=1), engine)
    try:
        yield preprocessor
    finally:
        preprocessor.close()
