"""Digests that tell models and configs apart."""

import json
from pathlib import Path

import pytest

from quartet.v1 import server_info_pb2
from services.code2wav.config import Code2WavSettings
from services.common.rpc.digest import checkpoint_digest, config_digest
from services.thinker.config import ThinkerSettings


def _checkpoint(folder: Path, indent: int | None = None, **config) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=indent))
    return str(folder)


def test_a_checkpoint_is_known_by_what_its_config_says(tmp_path):
    one = checkpoint_digest(_checkpoint(tmp_path / "a", hidden_size=8, layers=2, transformers_version="5.0"))
    same = checkpoint_digest(_checkpoint(tmp_path / "b", 4, layers=2, hidden_size=8, transformers_version="5.1"))
    other = checkpoint_digest(_checkpoint(tmp_path / "c", hidden_size=8, layers=3))
    assert one == same != other
    (tmp_path / "b/generation_config.json").write_text('{"temperature": 0.1}')
    assert checkpoint_digest(str(tmp_path / "b")) != one
    _checkpoint(tmp_path / "a/speech_tokenizer", codebook_size=8)
    assert checkpoint_digest(str(tmp_path / "a")) != one


def test_a_checkpoints_digest_is_the_one_of_yesterday(tmp_path):
    """A gateway of one release tells models of the next apart."""
    assert checkpoint_digest(_checkpoint(tmp_path / "a", model_type="some_omni", layers=2)) == "4f44c5aaab17e713"


@pytest.mark.parametrize("model", ["/nonexistent", "some/model-not-cached", "no id//"])
def test_a_model_without_files_here_has_none(model):
    assert checkpoint_digest(model) == ""


def _info(stage: str = "thinker", **changes) -> server_info_pb2.GetServerInfoResponse:
    info = server_info_pb2.GetServerInfoResponse(stage=stage, dtype="bfloat16", checkpoint_digest="c", **changes)
    info.thinker.accept_hidden_layer = 18
    return info


def test_only_what_changes_outputs_counts():
    one = config_digest(_info(), ThinkerSettings(model="m", port=1))
    assert config_digest(_info(device="cuda:0"), ThinkerSettings(model="n", port=2, max_running_requests=3)) == one
    limited = _info()
    limited.thinker.max_context_tokens = 99  # by the memory of its GPU
    assert config_digest(limited, ThinkerSettings(model="m")) == one
    assert config_digest(_info(), ThinkerSettings(model="m", video_fps=1)) != one
    precise = _info()
    precise.dtype = "float32"
    assert config_digest(precise, ThinkerSettings(model="m")) != one
    deeper = _info()
    deeper.thinker.accept_hidden_layer = 19
    assert config_digest(deeper, ThinkerSettings(model="m")) != one
    adapted = _info()
    adapted.thinker.loras.add(name="sea")
    assert config_digest(adapted, ThinkerSettings(model="m"), volatile=["loras"]) == one
    assert config_digest(adapted, ThinkerSettings(model="m")) != one
    assert config_digest(_info("code2wav"), Code2WavSettings(model="m")) != one
