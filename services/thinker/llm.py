"""What every stage with an engine of vLLM does with it: start it, end it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.thinker.environment import failure

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


async def started(load: "Callable[[], AsyncLLM]", scratch: Path) -> "AsyncLLM":
    """What `load` returns, which is called in a thread.

    Args:
        scratch: see `environment.scratch_dir`.

    Raises:
        ValueError: vLLM's process failed, with its error.
        Exception: what vLLM raises when it cannot load or does not fit.
    """
    try:
        return await asyncio.to_thread(load)
    except Exception as error:
        cause = await asyncio.to_thread(failure, scratch, error)
        if cause is None:
            raise
        raise ValueError(cause) from error


async def shut_down(llm: "AsyncLLM") -> None:
    """Ends the engine's processes."""
    if llm.output_handler:
        llm.output_handler.cancel()  # it would take the end of the engine for a failure
    await asyncio.to_thread(llm.shutdown)
    # Its destructor calls it again, and fails at the interpreter's end.
    llm.shutdown = lambda timeout=None: None
