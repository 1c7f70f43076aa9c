"""Flags, environment and YAML of one name, in that order; anything unknown is an error."""

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import StageSettings


class TalkerishSettings(StageSettings):
    model_config = SettingsConfigDict(env_prefix="QUARTET_TEST_")
    max_frames: int = Field(100, ge=1)


def test_flag_wins_over_environment_wins_over_yaml(tmp_path, monkeypatch):
    config = tmp_path / "stage.yaml"
    config.write_text("model: from-yaml\nmax_frames: 1\nport: 7\n")
    monkeypatch.setenv("QUARTET_TEST_MAX_FRAMES", "2")
    monkeypatch.setenv("QUARTET_TEST_PORT", "8")
    settings = TalkerishSettings.load(["--config", str(config), "--max-frames", "3"])
    assert (settings.model, settings.port, settings.max_frames) == ("from-yaml", 8, 3)


@pytest.mark.parametrize(
    ("yaml", "flags", "complaint"),
    [
        ("model: m\nmax_framez: 3\n", [], "max_framez"),
        ("model: m\nmax_frames: 0\n", [], "max_frames"),
        ("max_frames: 1\n", [], "model"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, yaml, flags, complaint):
    config = tmp_path / "stage.yaml"
    config.write_text(yaml)
    with pytest.raises(SystemExit, match=complaint):
        TalkerishSettings.load(["--config", str(config), *flags])


def test_unknown_flags_and_missing_files_are_refused(capsys):
    with pytest.raises(SystemExit):
        TalkerishSettings.load(["--model", "m", "--max-framez", "3"])
    with pytest.raises(SystemExit, match="not a file"):
        TalkerishSettings.load(["--config", "nowhere.yaml"])
