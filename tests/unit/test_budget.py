"""`quartet budget`: the arithmetic of the published model, what fits and what does not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.budget import GIB, BudgetError, Sizes, read_sizes, share_out
from cli.main import app
from cli.tiny import make_checkpoint

# Qwen3-Omni-30B-A3B-Instruct in bfloat16: 31.7, 3.3 and 0.2 billion parameters, 48 layers of 4 KV heads, 20 of 2.
ROOT = Path(__file__).parent.parent.parent
PUBLISHED = Sizes(
    weights={"thinker": 63_400_000_000, "talker": 6_600_000_000, "code2wav": 400_000_000},
    kv_per_token=96 * 1024,
    states_per_token=8 * 1024,
    talker_kv_per_position=20 * 1024,
)


def test_the_published_model_on_96_gib():
    budget = share_out(PUBLISHED, 96 * GIB, streams=8, context_tokens=32_768, talker_positions=8192)
    assert sum(share.total for share in budget.shares) <= 0.97 * 96 * GIB
    thinker, talker, code2wav = budget.shares
    assert talker.requests == 8 * 8192 * 20 * 1024
    assert code2wav.requests < 0.1 * GIB
    assert budget.context_tokens * (96 + 8) * 1024 == thinker.requests
    share = budget.settings["THINKER_GPU_MEMORY_UTILIZATION"]
    for file in (".env.example", "deploy/docker/gpu.yaml"):
        assert share in (ROOT / file).read_text()
    # vLLM's share is without the kept states, which come on top of it
    assert thinker.total - budget.context_tokens * 8 * 1024 >= float(share) * 96 * GIB


def test_what_does_not_fit_is_refused():
    with pytest.raises(BudgetError, match=r"80.0 GiB are 0.8 GiB too few.*one context of 32768 tokens.*--streams"):
        share_out(PUBLISHED, 80 * GIB, streams=8, context_tokens=32_768, talker_positions=8192)
    assert share_out(PUBLISHED, 80 * GIB, streams=4, context_tokens=8192, talker_positions=4096).context_tokens >= 8192


def test_sizes_are_the_checkpoints(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "tiny", seed=0, size="tiny")
    sizes = read_sizes(str(checkpoint))
    text = json.loads((checkpoint / "config.json").read_text())["thinker_config"]["text_config"]
    assert sizes.kv_per_token == 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * 4
    files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert 0.9 * files < sum(sizes.weights.values()) <= files

    result = CliRunner().invoke(app, ["budget", "--model", str(checkpoint), "--gpu-memory-gib", "16"])
    assert result.exit_code == 0, result.output
    assert "TALKER_MAX_RUNNING_REQUESTS=8" in result.output
    assert CliRunner().invoke(app, ["budget", "--model", str(checkpoint), "--gpu-memory-gib", "4"]).exit_code == 1


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(BudgetError, match="--model"):
        read_sizes(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(BudgetError, match="thinker_config"):
        read_sizes(str(tmp_path))
