"""The thinker split over two processes: token ids, and the states that the first of them sends, are those of one."""

import asyncio
from pathlib import Path

import pytest

from tests.stage.test_thinker_engine import conversations, start

CORES = "VLLM_CPU_OMP_THREADS_BIND"
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]  # an engine of its own, of two processes


async def test_two_ranks_answer_as_transformers_does_and_each_row_comes_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORES, "")
    monkeypatch.delenv(CORES)  # what the engine's start puts there is gone afterwards
    thinker = await start(tiny_checkpoint, tensor_parallel_size=2, max_batched_tokens=64)
    try:
        assert thinker.engine._llm.vllm_config.parallel_config.world_size == 2
        cases = [conversations()[name] for name in ("text", "image and audio", "video with sound")]
        for _ in range(2):  # cold, then from the prefix cache
            results = await asyncio.gather(*(thinker.run(case, f"r{i}") for i, case in enumerate(cases)))
            for conversation, result in zip(cases, results, strict=True):
                thinker.assert_equal(result, thinker.expected(conversation))
        assert results[0].cached_tokens > 0
    finally:
        await thinker.engine.close()
        thinker.preprocessor.close()
