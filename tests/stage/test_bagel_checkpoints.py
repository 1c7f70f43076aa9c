"""BAGEL's checkpoints: which are taken, which settings fit them, and where they are found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.check import check_model
from cli.dit_memory import dit_need, encoder_need
from cli.doctor.fit import model_dtype
from cli.pipeline_sizes import read_pipeline
from cli.plan import DIT_PIPELINE, pipeline_for
from services.common.rpc.digest import checkpoint_digest
from services.diffusion import pipelines
from services.diffusion.pipelines import find_checkpoint
from services.dit.config import DitSettings
from services.dit.context_parallel.ranks import check as check_parallelism
from services.dit.models import load_pipeline
from services.encoder.config import EncoderSettings
from services.families.bagel.checkpoint import BagelCheckpoint
from tests.support.weights.checkpoints import diffusion_checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return diffusion_checkpoint("bagel")


def _bytes(*models: torch.nn.Module) -> int:
    return sum(parameter.nbytes for model in models for parameter in model.parameters())


def broken(checkpoint: Path, out: Path, how: str) -> None:
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    llm = json.loads((out / "llm_config.json").read_text())
    weights = load_file(out / "ema.safetensors")
    if how == "file":
        (out / "ae.safetensors").unlink()
    elif how == "key":
        del llm["rope_theta"]
    elif how == "shape":
        llm["intermediate_size"] += 1
    elif how == "activation":
        llm["hidden_act"] = "gelu"
    elif how == "tensor":
        del weights["connector.fc1.bias"]
    (out / "llm_config.json").write_text(json.dumps(llm) if how != "json" else "{")
    save_file(weights, out / "ema.safetensors")
    if how == "cut":
        (out / "ema.safetensors").write_bytes((out / "ema.safetensors").read_bytes()[:-100])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("file", "has no ae.safetensors: the checkpoint is not whole"),
        ("key", "llm_config.json: rope_theta is missing"),
        ("json", "llm_config.json is not JSON"),
        ("activation", "llm_config.json: hidden_act is 'gelu'; silu is served"),
        ("cut", "ema.safetensors is corrupt or not all there"),
        ("tensor", "ema.safetensors has no connector.fc1.bias"),
        ("shape", r"mlp.*weight is \[80, 128\], not \[81, 128\], which the config files say"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(checkpoint: Path, tmp_path: Path, how: str, words: str) -> None:
    broken(checkpoint, tmp_path, how)
    with pytest.raises(ValueError, match=words):
        load_pipeline(DitSettings(model=str(tmp_path)), False)


@pytest.mark.parametrize("setting", [{"quantization": "float8-storage"}, {"offload": "group"}, {"cache": "taylorseer"}])
def test_settings_that_do_not_fit_are_refused(checkpoint: Path, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        load_pipeline(DitSettings(model=str(checkpoint), **setting), False)


def test_devices_do_not_share_its_calls(checkpoint: Path) -> None:
    settings = DitSettings(model=str(checkpoint), context_parallel={"ulysses": 2})
    with pytest.raises(ValueError, match="context_parallel ulysses=2: how the calls of this pipeline are divided"):
        check_parallelism(settings, checkpoint)


def test_it_is_fetched_from_the_hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, str | None, list[str]]] = []

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("there is no model_index.json")

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append((name, revision, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(pipelines.DiffusionPipeline, "download", refuse)
    monkeypatch.setattr(pipelines.modular_index, "fetch", refuse)
    monkeypatch.setattr(pipelines, "snapshot_download", fetch)
    assert find_checkpoint("a/b@c") == checkpoint
    weights = ["ema.safetensors", "ae.safetensors"]
    assert fetched == [("a/b", "c", ["*.json"]), ("a/b", "c", ["*.json", "*.txt", *weights])]
    monkeypatch.setattr(pipelines, "OWN", {})
    monkeypatch.setattr(pipelines, "own_class", lambda folder: None)
    with pytest.raises(ValueError, match="neither a directory nor a diffusers model on the hub"):
        find_checkpoint("a/b")


def test_the_command_line_takes_it_for_a_dits(checkpoint: Path) -> None:
    model = str(checkpoint)
    assert pipeline_for(model) == DIT_PIPELINE
    assert model_dtype(model) == "float32"
    for kind in ("dit", "encoder"):
        check_model("--model", model, kind)
    sizes = read_pipeline(model)
    stored = sum((checkpoint / f"{name}.safetensors").stat().st_size for name in ("ae", "ema"))
    assert stored - 200_000 < sum(sizes.weights.values()) < stored  # but for the headers
    alone, streamed = (dit_need(sizes, DitSettings(model=model, encoders=each)).weights for each in ("own", "stream"))
    parts = BagelCheckpoint(checkpoint).empty(("text_encoder", "transformer", "vae"), torch.float32)
    assert streamed == _bytes(parts["transformer"], parts["vae"]), "the encoder's process has the rest"
    assert encoder_need(sizes, EncoderSettings(model=model)).weights == _bytes(parts["text_encoder"])
    assert streamed < alone == sum(sizes.weights.values())
    assert checkpoint_digest(model)


def test_it_is_found_as_it_is_published(checkpoint: Path, tmp_path: Path) -> None:
    assert find_checkpoint(str(checkpoint)) == checkpoint
    with pytest.raises(ValueError, match="it is no diffusers checkpoint"):
        find_checkpoint(str(tmp_path))
