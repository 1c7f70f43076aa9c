"""Each part of the training begins, stops and goes on: two steps, then one more."""

import subprocess
import sys
from pathlib import Path

import pytest

from training.__main__ import PARTS

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(1500)]
# Those that read what others wrote come after them.
ORDER = (
    *("code2wav", "talker", "hearing", "seeing", "painter_vae", "painter", "paintings", "thinker", "tools"),
    "conversations",
)
# Few of all: sounds and pictures of the bank, dialogues a step.
BRIEF = """
import sys
from pathlib import Path
from training import loop, units, codec
loop.OUT = Path(sys.argv[2])
units.FILE = loop.OUT / "units.npz"
codec.Codes.file = loop.OUT / "codes.pt"
import training.thinker as thinker
import training.hearing, training.seeing, training.painter, training.talker, training.tools as tools
import training.paintings as paintings, training.conversations as conversations
thinker.BANK_SOUNDS, thinker.BANK_IMAGES, thinker.GROUPS = 9, 50, 2
tools.GROUPS, tools.ABOUT_TOOLS = 2, 1
paintings.SCENES, paintings.PAINTINGS, paintings.UNNAMED, paintings.BANK_PAINTINGS = 1, 1, 1, 4
conversations.GROUPS, conversations.CONVERSATIONS, conversations.ABOUT_TOOLS = 2, 1, 1
parts = (codec, training.hearing, training.seeing, training.painter, training.talker, paintings, thinker, tools)
for module in (*parts, conversations):
    module.BATCH = 3
    module.STEPS = int(sys.argv[3])
training.painter.VAE_STEPS = int(sys.argv[3])
import importlib
from training.__main__ import PARTS
name, function = PARTS[sys.argv[1]]
getattr(importlib.import_module(name), function)()
"""


def test_every_part_begins_and_goes_on(tmp_path: Path) -> None:
    assert set(ORDER) == set(PARTS)
    for part in ORDER:
        for steps in (2, 3):
            command = [sys.executable, "-c", BRIEF, part, str(tmp_path), str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (part, done.stderr[-2000:])
            assert f"{part}: step {steps}/{steps}" in done.stdout
