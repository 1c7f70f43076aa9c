"""Flags, environment and YAML of one name, in that order; anything unknown is an error."""

import re
from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import Settings, StageSettings
from services.dit.config import DitSettings
from tests.support.settings_of_processes import PROCESSES, required_flags

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("process", PROCESSES.values())
def test_a_misspelt_variable_is_named_beside_the_setting_that_is_nearest(
    process: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = process.model_config.get("env_prefix")
    meant = next(name for name in ("max_running_requests", "max_calls") if name in process.model_fields).upper()
    misspelt = meant.replace("NN", "N").replace("LL", "L")
    monkeypatch.setenv(f"{prefix}{misspelt}", "8")
    monkeypatch.setenv(f"{prefix}XYZZY", "8")
    monkeypatch.setenv("QUARTET_OF_NO_PROCESS", "8")
    with pytest.raises(SystemExit) as refused:
        process.load(required_flags(process))
    assert str(refused.value).splitlines()[1:] == [
        f"{prefix}{misspelt}: no such setting; is {prefix}{meant} meant?",
        f"{prefix}XYZZY: no such setting; see --help",
    ]


def test_a_variable_of_compose_alone_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_DIT_MODEL_NAME", "pictures")
    assert DitSettings.load(["--model=x"]).model_name == "x"


def test_every_variable_of_a_process_that_is_written_down_is_a_setting() -> None:
    """In the deployments, in their examples and in the documents."""
    written = [ROOT / "docker-compose.yaml", ROOT / ".env.example", ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    written += [path for path in ROOT.glob("deploy/**/*") if path.is_file() and path.suffix != ".json"]
    texts = {path: path.read_text() for path in written}
    found = 0
    for process in PROCESSES.values():
        prefix = process.model_config.get("env_prefix")
        known = {f"{prefix}{name.upper()}" for name in process.model_fields} | set(process.for_others)
        for path, text in texts.items():
            names = set(re.findall(rf"\b{prefix}[A-Z0-9_]+", text))
            assert names <= known, f"{path}: {names - known}"
            found += len(names)
    assert found > 50
