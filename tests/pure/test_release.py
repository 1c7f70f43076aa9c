"""A release is whole: its version, its section in CHANGELOG.md and the image of its protos go together."""

import re
import tomllib
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = ROOT / f"protos/released/{VERSION}.binpb"


def test_the_version_is_the_last_dated_one_of_the_changelog() -> None:
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_the_version_has_an_image_of_its_protos() -> None:
    """`make lint` compares protos/ with it."""
    image = FileDescriptorSet.FromString(IMAGE.read_bytes())
    released = {Path(file.name).name for file in image.file if file.package == "quartet.v1"}
    assert {"talker.proto", "thinker.proto"} <= released
    assert released <= {path.name for path in (ROOT / "protos/quartet/v1").glob("*.proto")}
