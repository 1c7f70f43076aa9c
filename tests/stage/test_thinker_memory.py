"""What the thinker's engine is told about memory and steps, for GPUs that are not here. Starts nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.common.stream.rows import hidden_states
from services.thinker.config import ThinkerSettings
from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind, RowStore, row_bytes

GIB = 1024**3
HIDDEN = 2048
KINDS = (RowKind(hidden_states(24), HIDDEN), MROPE_POSITIONS)


def vllm_config(kv_cache_bytes: int | None = None) -> Any:
    from services.thinker.plugin.connector import PluginSettings

    return SimpleNamespace(
        kv_transfer_config=PluginSettings(KINDS, "ipc://@nobody").to_vllm(),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_cache_bytes, block_size=16),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: HIDDEN),
    )


def test_the_rank_that_keeps_the_rows_has_less_for_its_kv_cache() -> None:
    """Qwen3-Omni-30B-A3B over four GPUs: one KV head each of 128 elements, 48 layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

    from services.thinker.plugin.recording import kv_bytes_per_slot, leave_room

    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    specs: list[dict[str, KVCacheSpec]] = [{f"layers.{i}": layer for i in range(48)}] * 4
    kv_bytes, rows = kv_bytes_per_slot(specs[0]), row_bytes(KINDS, torch.bfloat16)
    assert (kv_bytes, rows) == (24 * 1024, 4096 + 12)
    first, *others = leave_room(vllm_config(), specs, [48 * GIB] * 4)
    assert others == [48 * GIB] * 3
    slots = first // kv_bytes
    assert slots * (kv_bytes + rows) <= 48 * GIB < (slots + 2) * (kv_bytes + rows)
    assert leave_room(vllm_config(kv_cache_bytes=GIB), specs, [GIB] * 4) == [GIB] * 4  # asked for exactly


@pytest.mark.parametrize(("rank", "keeps"), [(0, True), (1, False)])
def test_only_the_first_rank_keeps_rows(rank: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.thinker.plugin import connector

    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(connector, "RowSender", lambda address: address)
    worker: Any = connector.RowConnector.__new__(connector.RowConnector)
    worker._vllm_config, worker._settings = vllm_config(), connector.settings_of(vllm_config())
    worker._block_size, worker._kv_cache_config, worker._sender = 16, SimpleNamespace(num_blocks=4), None
    try:
        worker.register_kv_caches({"layers.0": torch.zeros(4)})
        rows = RowStore.installed
        assert (rows is not None, worker._sender is not None) == (keeps, keeps)
        assert rows is None or rows.size_bytes == (4 * 16 + 1) * row_bytes(KINDS, torch.bfloat16)
    finally:
        RowStore.installed = None


def test_a_step_has_as_many_tokens_as_vllm_gives_its_own_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.thinker import engine

    def from_vllm_config(config: list[object], usage_context: object = None, **__: object) -> list[object]:
        return [*config, usage_context]

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", from_vllm_config)
    monkeypatch.setattr(engine, "engine_args", lambda *_: SimpleNamespace(create_engine_config=lambda usage: [usage]))
    monkeypatch.setattr(engine, "make_room_for_media", lambda config: None)
    (tmp_path / "config.json").write_text("{}")
    checkpoint: Any = SimpleNamespace(dtype="bfloat16", folder=tmp_path)
    contexts: Any = engine._load(ThinkerSettings(model="org/name"), checkpoint, "ipc://@nobody")
    assert contexts == [UsageContext.OPENAI_API_SERVER] * 2  # what that is on a GPU: tests/rehearsal/test_vllm_cuda.py
