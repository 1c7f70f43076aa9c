"""Engines, streams and the gateway name no model family: what a family needs is said in its place."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAMILY = re.compile(
    r"qwen|bagel|flux|hunyuan|cosmos|janus|emu3|ltx|z[-_]?image(?=pipeline|[-_ ]turbo)|glm[-_]?image|stable[-_ ]?audio"
    r"|ace[-_]?step|cogvideo|mochi|longcat|ovis|\bwan(?=[-_ ]?2|pipeline|transformer)",
    re.IGNORECASE,
)
PLACES = (
    "services/families/",
    "services/registry.py",
    "services/demo_models/",
    "services/diffusion/families.py",
    "gateway/pipelines/",
    "gateway/settings.py",
)  # checkpoints name their classes; a pipeline file names its model, and the settings' help names a pipeline file


def names_in(folder: Path, excepted: tuple[str, ...]) -> Iterator[str]:
    """Where a file under services or gateway names a family, as FILE:LINE: TEXT."""
    for path in sorted(file for top in ("services", "gateway") for file in (folder / top).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in (".py", ".yaml", ".jinja", ".toml", ".json") or name.startswith(excepted):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FAMILY.search(line):
                yield f"{name}:{number}: {line.strip()}"


def test_families_are_named_in_their_place_only() -> None:
    assert list(names_in(ROOT, PLACES)) == []


def test_a_name_is_found_wherever_it_is_and_no_word_is_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "services/families").mkdir(parents=True)
    (tmp_path / "gateway").mkdir()
    (tmp_path / "services/families/mine.py").write_text("Qwen3OmniThinker")
    (tmp_path / "services/engine.py").write_text("wanted = None\n# as Qwen3-Omni does\n")
    (tmp_path / "gateway/x.yaml").write_text("model: wan2.2\nwant: 3\n")
    found = list(names_in(tmp_path, PLACES))
    assert found == ["gateway/x.yaml:1: model: wan2.2", "services/engine.py:2: # as Qwen3-Omni does"]
