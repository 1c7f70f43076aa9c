"""A checkpoint without talker and code2wav: what the commands make of it, before and without a start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.budget import GIB, Demand, Gpus
from cli.budget_report import lines
from cli.check import check_model
from cli.doctor.fit import stages_of
from cli.layouts import best, layouts
from cli.plan import PIPELINE, UsageError, pipeline_for
from cli.sizes import read_sizes
from services.code2wav.family import load_decoder
from services.registry import family_of, read_config
from services.talker.model import load_talker
from tests.support.systems.hub import serving
from tests.support.weights.checkpoints import thinking_checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return thinking_checkpoint()


def test_its_thinker_is_all_that_is_started(checkpoint: Path, tiny_checkpoint: Path) -> None:
    assert pipeline_for(str(checkpoint)).name == "text.yaml"
    assert pipeline_for(str(tiny_checkpoint)) == PIPELINE
    assert stages_of(str(checkpoint)) == ["thinker"]
    check_model("--model", str(checkpoint), "thinker")
    for stage in ("talker", "code2wav"):
        with pytest.raises(UsageError, match=f"this checkpoint has no {stage}: give --pipeline text"):
            check_model("--model", str(checkpoint), stage)


def test_one_on_the_hub_is_known_by_its_config(checkpoint: Path, tmp_path: Path) -> None:
    with serving("some/thinker", checkpoint) as hub:
        command = [sys.executable, "-m", "cli.main", "up", "--model", hub.model, "--talker-arg=--device=cpu"]
        environment = {**os.environ, **hub.environment(tmp_path)}
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "text.yaml has no stage of kind talker" in refused.stderr
    assert {path for _, path in hub.log if not path.startswith("/")} == {"config.json"}


def test_what_the_hub_has_not_is_taken_for_the_usual_one() -> None:
    assert pipeline_for("nobody/nothing") == PIPELINE  # and the hub is not to be asked, in tests


def test_its_stages_of_speech_say_that_they_are_not_there(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    with pytest.raises(ValueError, match="the checkpoint has no code2wav"):
        load_decoder(str(checkpoint))
    with pytest.raises(ValueError, match="the checkpoint has no talker"):
        load_talker(str(checkpoint), torch.device("cpu"))
    assert family_of(config).stages(config) == ["thinker"]


def test_its_budget_is_the_thinkers(checkpoint: Path) -> None:
    sizes = read_sizes(str(checkpoint))
    assert list(sizes.weights) == ["thinker"]
    assert not any(layout.others for layout in layouts(sizes, Gpus.alike(24 * GIB, 4), Demand()))
    one, two = (best(sizes, Gpus.alike(24 * GIB, ranks), Demand(), ranks) for ranks in (1, 2))
    assert [share.stage for share in one.shares] == ["thinker"]
    assert not any("TALKER" in line or "CODE2WAV" in line for line in lines(one))
    flags = [line for line in lines(two) if line.startswith("--")]
    assert flags
    assert all(flag.startswith("--thinker-arg=") for flag in flags)
