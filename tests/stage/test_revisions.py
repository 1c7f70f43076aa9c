"""A model of the hub at a revision: from a cache made by hand, without a network."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from cli import hub as cli_hub
from cli.check import check_model
from cli.hardware import at_revision
from cli.plan import UsageError
from cli.sizes import read_sizes
from cli.terminal import CommandError
from services.code2wav.config import Code2WavSettings
from services.common.engine.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from services.common.rpc.digest import checkpoint_digest
from services.common.rpc.settings import StageSettings
from services.diffusion.pipelines import find_checkpoint
from tests.support.weights.checkpoints import diffusion_checkpoint

OMNI, PAINTER = "some/omni", "some/painter"
OLD, NEW = "1" * 40, "2" * 40  # commits; "v1" is a tag of the old one, "main" the new one


def _snapshots(cache: Path, model: str, folder: Path) -> tuple[Path, Path]:
    """The old and the new one, both copies of `folder`."""
    home = cache / f"models--{model.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    for ref, commit in {"v1": OLD, "main": NEW}.items():
        (home / "refs" / ref).write_text(commit)
        shutil.copytree(folder, home / "snapshots" / commit, copy_function=os.link)
    return home / "snapshots" / OLD, home / "snapshots" / NEW


def _changed(file: Path, text: str) -> None:
    file.unlink()  # it is linked to the original
    file.write_text(text)


@pytest.fixture(scope="module")
def cache(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cache")
    old, _ = _snapshots(made, OMNI, tiny_checkpoint)
    names = json.loads((old / INDEX_FILE).read_text())["weight_map"] if (old / INDEX_FILE).exists() else {}
    file = old / names.get("code2wav.code_embedding.weight", SINGLE_FILE)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((old / "config.json").read_text())
    _changed(old / "config.json", json.dumps(config | {"revision": "old"}))
    old, _ = _snapshots(made, PAINTER, diffusion_checkpoint("sd3"))
    return made


@pytest.fixture(autouse=True)
def here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(cli_hub, "is_reached", lambda: False)


@pytest.mark.parametrize(
    ("revision", "commit"), [("", NEW), ("@main", NEW), ("@v1", OLD), (f"@{OLD}", OLD), (f"@{NEW}", NEW)]
)
def test_every_reader_of_a_checkpoint_reads_that_revision(cache: Path, revision: str, commit: str):
    checkpoint = Checkpoint(OMNI + revision)
    checkpoint.select(lambda name: name.startswith("code2wav."))
    folder = checkpoint.folder
    assert folder.name == commit
    assert any(tensor.any() for _, tensor in checkpoint.tensors()) == (commit == NEW)
    assert checkpoint_digest(OMNI + revision) == checkpoint_digest(str(folder))
    assert cli_hub.fetched(OMNI + revision, "config.json").parent == folder
    assert read_sizes(OMNI + revision) == read_sizes(str(folder))
    assert find_checkpoint(PAINTER + revision).name == commit


def test_revisions_of_one_model_have_digests_of_their_own():
    assert checkpoint_digest(f"{OMNI}@v1") != checkpoint_digest(OMNI) != ""


def test_a_stage_serves_a_revision_by_the_models_name():
    settings = Code2WavSettings.load(["--model", OMNI, "--revision", "v1"])
    assert (settings.model, settings.model_name) == (f"{OMNI}@v1", OMNI)
    assert Code2WavSettings.load(["--model", f"{OMNI}@v1"]).model_name == OMNI
    assert Code2WavSettings(**settings.model_dump()).model_dump() == settings.model_dump()
    assert Code2WavSettings.load(["--model", OMNI, "--revision", "v1", "--served-model-name", "x"]).model_name == "x"


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("{directory}", "v1", "a directory has no revisions"),
        ("quartet-demo", "v1", "a directory has no revisions"),
        (f"{OMNI}@v1", "v2", "names one already"),
        (OMNI, "../x", "is no commit, branch or tag"),
    ],
)
def test_a_revision_that_cannot_be_is_refused_by_a_sentence(
    tiny_checkpoint: Path, model: str, revision: str, reason: str
):
    model = model.format(directory=tiny_checkpoint)
    with pytest.raises(SystemExit, match=f"--revision: .*{reason}"):
        Code2WavSettings.load(["--model", model, "--revision", revision])
    with pytest.raises(CommandError, match=f"--revision {revision}: .*{reason}"):
        at_revision(model, revision)


def test_a_revision_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    for read in (Checkpoint, find_checkpoint):
        with pytest.raises(ValueError, match=f"{OMNI}@v9 is neither a directory nor a .*model") as refused:
            read(f"{OMNI}@v9")
        assert "\n" not in str(refused.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match=f"^--model {OMNI}@v9: "):
        check_model("--model", f"{OMNI}@v9", "code2wav")


def test_every_stage_has_the_setting():
    assert "revision" in StageSettings.model_fields
