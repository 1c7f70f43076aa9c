"""Checkpoints in the published shape, read by their id on the hub: each file is asked for once at most."""

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from services.common.engine.weights import Checkpoint
from tests.support.systems import hub_starts
from tests.support.systems.hub import Hub, serving

pytestmark = pytest.mark.long  # it starts a thinker

MODEL = "some/omni"
STAGES = ("thinker", "talker", "code2wav")
CONFIG = {"config.json", "generation_config.json", "model.safetensors.index.json"}
TOKENIZER = {"tokenizer_config.json", "vocab.json", "merges.txt"}
PROCESSOR = {"preprocessor_config.json", "chat_template.json", *TOKENIZER}


@dataclass
class Starts:
    """What the stages' starts asked the hub for, and what they got."""

    cache: Path
    requests: dict[str, Counter[tuple[str, str]]]
    """By STAGE/CACHE."""
    got: dict[str, Any]


@pytest.fixture(scope="module")
def starts(published_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    cache = tmp_path_factory.mktemp("hub")
    with serving(MODEL, published_checkpoint) as hub:
        command = [sys.executable, "-m", hub_starts.__name__, MODEL, str(cache / "got")]
        environment = {**os.environ, **hub.environment(cache)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        return Starts(cache, _by_start(hub), pickle.loads((cache / "got").read_bytes()))


def _by_start(hub: Hub) -> dict[str, Counter[tuple[str, str]]]:
    """What was asked for, cut where a start was told to the hub."""
    found: dict[str, list[tuple[str, str]]] = {}
    for method, path in hub.log:
        if path.startswith("/start/"):
            found[path.removeprefix("/start/")] = []
        else:
            found[next(reversed(found))].append((method, path))
    return {start: hub.about_model(log) for start, log in found.items()}


def _files(requests: Counter[tuple[str, str]]) -> set[str]:
    return {path for _, path in requests if not path.startswith("/")}


def _holding(published: Path, *prefixes: str) -> set[str]:
    weights = json.loads((published / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for name, file in weights.items() if name.startswith(prefixes)}


@pytest.mark.parametrize("stage", STAGES)
def test_a_first_start_asks_for_each_file_once(starts: Starts, stage: str) -> None:
    """By HEAD for its hash and by GET for its content: the hub's client fetches a file no other way."""
    requests = starts.requests[f"{stage}/cold"]
    assert ("GET", "config.json") in requests
    assert set(requests.values()) == {1}, requests


@pytest.mark.parametrize("stage", STAGES)
def test_a_later_start_asks_once_whether_there_is_another_commit(starts: Starts, stage: str) -> None:
    assert starts.requests[f"{stage}/warm"] == {("GET", f"/api/models/{MODEL}/revision/main"): 1}


def test_a_stage_fetches_only_what_it_reads(starts: Starts, published_checkpoint: Path) -> None:
    everything = _holding(published_checkpoint, "")
    talker = _holding(published_checkpoint, "talker.", "thinker.model.embed_tokens.")
    code2wav = _holding(published_checkpoint, "code2wav.")
    wanted = {"thinker": PROCESSOR | everything, "talker": TOKENIZER | talker, "code2wav": code2wav}  # vLLM insists
    for stage, files in wanted.items():
        assert _files(starts.requests[f"{stage}/cold"]) == CONFIG | files, stage
    assert talker < everything > code2wav


@pytest.mark.parametrize(
    ("stage", "options"), [("thinker", ["bfloat16"]), ("talker", [torch.bfloat16]), ("code2wav", ["bfloat16"])]
)
def test_a_stage_reads_the_same_as_from_a_directory_of_today(
    starts: Starts, tiny_checkpoint: Path, stage: str, options: list
) -> None:
    assert starts.got[stage] == hub_starts.READERS[stage](str(tiny_checkpoint), *options)


def local_folder(model: str, wanted: Callable[[str], bool]) -> Path:
    checkpoint = Checkpoint(model)
    checkpoint.fetch(wanted)
    return checkpoint.folder


def test_without_the_hub_a_start_needs_every_file_here(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may not reach a hub. code2wav was the last to fetch its files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(starts.cache / "hub"))
    assert (local_folder(MODEL, lambda name: name.startswith("code2wav.")) / "config.json").is_file()
    with pytest.raises(ValueError, match=rf"{MODEL} is neither a directory nor a model that the hub has"):
        local_folder(MODEL, lambda name: name.startswith("talker."))


@pytest.mark.parametrize("model", ["/no/such/directory", "some/other"])
def test_a_model_that_is_nowhere_is_named(model: str) -> None:
    with pytest.raises(ValueError, match=f"{model} is neither a directory nor a model that the hub has"):
        local_folder(model, lambda name: True)
