"""The checkpoints that come with Quartet: their names, their size, and that what tests ask was never trained on."""

import json
import random
from pathlib import Path

import pytest
import torch

from cli.check import check_model
from cli.plan import DIT_PIPELINE, OMNI_DIT_PIPELINE, PIPELINE, UsageError, demo_options, pipeline_for, stages_to_start
from services.code2wav.family import load_decoder
from services.common.engine.weights import compute_dtype
from services.demo_models import ALIGNER, OMNI, PAINTER, PAINTER_SIZE, is_shipped, resolve
from services.dit.config import DitSettings
from services.talker.config import TalkerSettings
from services.talker.model import load_talker
from training.dialogue import is_held_out
from training.scenes import draw_scene
from training.world import KINDS, draw_dialogue, nonsense, outside, small_talk

MOST_BYTES = 25_000_000  # of all together


def test_a_shipped_model_is_served_by_its_name() -> None:
    settings = TalkerSettings.load(["--model", OMNI])
    assert settings.model_name == OMNI
    assert Path(settings.model, "config.json").is_file()
    assert TalkerSettings.load(["--model", OMNI, "--served-model-name", "mine"]).model_name == "mine"
    assert TalkerSettings.load(["--model", OMNI, "--served-model-name", ""]).model_name == OMNI  # as compose has it


def test_the_painter_has_the_size_that_it_was_trained_on() -> None:
    assert DitSettings.load(["--model", PAINTER]).default_size == PAINTER_SIZE
    assert DitSettings.load(["--model", PAINTER, "--default-size", "64x64"]).default_size == "64x64"
    assert DitSettings.load(["--model", "Qwen/Qwen-Image"]).default_size is None


def test_a_directory_of_that_name_is_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_shipped(OMNI)
    (tmp_path / OMNI).mkdir()
    assert not is_shipped(OMNI)
    assert resolve(OMNI) == OMNI
    assert resolve("nobody/else") == "nobody/else"


def test_without_a_model_all_are_started() -> None:
    stages = {stage.name: stage for stage in stages_to_start(demo_options())}
    assert {stage.model for stage in stages.values()} == {OMNI, PAINTER, ALIGNER}
    assert demo_options(DIT_PIPELINE).aligner_model is None
    assert demo_options(PIPELINE).aligner_model == ALIGNER
    assert demo_options(aligner_model="a/b").aligner_model == "a/b"
    assert demo_options(DIT_PIPELINE).model == PAINTER
    assert demo_options(PIPELINE).dit_model is None
    assert demo_options(PIPELINE, dit_model=None).model == OMNI
    assert pipeline_for(OMNI) == PIPELINE
    assert pipeline_for(PAINTER) == DIT_PIPELINE
    assert demo_options().pipeline == OMNI_DIT_PIPELINE


def test_a_mistyped_name_is_told_the_right_one() -> None:
    with pytest.raises(UsageError, match=OMNI):
        check_model("--model", "quartet-dmo", "thinker")


def test_they_are_small_and_say_what_they_are() -> None:
    folders = [Path(resolve(model)) for model in (OMNI, PAINTER, ALIGNER)]
    assert sum(file.stat().st_size for folder in folders for file in folder.rglob("*.safetensors")) <= MOST_BYTES
    for folder in folders:
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlicense: apache-2.0\n")
        assert "training/README.md" in card
    config = json.loads(Path(folders[0], "config.json").read_text())
    assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]


def test_stages_compute_in_the_dtype_of_their_config() -> None:
    folder = Path(resolve(OMNI))
    assert load_decoder(str(folder), device="cpu").dtype == torch.float32  # stored in bfloat16
    assert load_talker(str(folder), torch.device("cpu"))[1].dtype == torch.float32
    stored = torch.bfloat16
    assert compute_dtype({}, stored) == stored
    assert compute_dtype({"torch_dtype": "float16"}, stored) == torch.float16
    with pytest.raises(ValueError, match="is 'float17'"):
        compute_dtype({"dtype": "float17"}, stored)


def test_what_is_held_out_is_never_drawn_for_training() -> None:
    asked = {kind: share for kind, share in KINDS.items() if kind not in (small_talk, nonsense)}
    trained = {_combination(random.Random(seed), False, asked) for seed in range(2000)}
    held_out = {_combination(random.Random(seed), True, asked) for seed in range(2000)}
    assert len(trained) > 500
    assert len(held_out) > 200
    assert not trained & held_out
    assert not any(is_held_out(question) for kind, question in trained if kind not in ("outside", "seeing", "sums"))


def _combination(draw: random.Random, held_out: bool, kinds: dict) -> tuple[str, str]:
    dialogue = draw_dialogue(draw, held_out, kinds)
    if dialogue.scene is not None:
        return dialogue.kind, f"{sorted(dialogue.scene.things.items())}"
    turns = dialogue.turns[:1] if dialogue.tool_result is not None else dialogue.turns[-2:]
    return dialogue.kind, " ".join(turn.question for turn in turns)


def test_pictures_have_what_they_say() -> None:
    picture = draw_scene(random.Random(3))
    assert picture.render().size == (128, 128)
    assert 1 <= picture.things.total() <= 5
    assert outside(random.Random(0)).turns[0].answer == "I do not know that."
