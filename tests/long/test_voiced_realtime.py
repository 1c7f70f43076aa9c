"""The realtime tests of an omni model, on a thinker whose text another model speaks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.plan import VOICED_PIPELINE
from tests.support.systems.stack import Access, Stack, brief_pipeline, running
from tests.support.weights.checkpoints import tts_checkpoint
from tests.system.test_realtime import *  # noqa: F403

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Instead of that of all tests: the omni model's thinker hears and writes, Qwen3-TTS speaks."""
    home = tmp_path_factory.mktemp("voiced")
    voice = ("--talker-model", str(tts_checkpoint("qwen3-tts")))
    pipeline = ("--pipeline", str(brief_pipeline(home, VOICED_PIPELINE)))
    with running(tiny_checkpoint, home / "run", *pipeline, *voice, access=Access(home)) as started:
        yield started
