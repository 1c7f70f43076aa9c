"""The aligner that comes along, on speech whose times espeak-ng says: a minute here, ten in the weekly tests."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from services.aligner.config import AlignerSettings
from services.aligner.engine import load_engine
from services.aligner.family import RATE_HZ, Sound
from services.demo_models import ALIGNER

ROOT = Path(__file__).parents[2]
HANG_GUARD_S = 1200
MEDIAN_MS, P95_MS, LARGEST_MS = 5, 40, 500  # the largest, and most of a minute, are of numbers in digits


@pytest.mark.parametrize("minutes", [1, pytest.param(10, marks=pytest.mark.weekly)])
def test_errors_of_begins_and_ends(minutes: int, tmp_path: Path) -> None:
    """In a process of its own: espeak-ng has one state in each."""
    pytest.importorskip("espeakng_loader", reason="espeakng-loader is not installed")
    file = tmp_path / "figures.json"
    program = [sys.executable, "-m", "benchmarks.word_times", "--minutes", str(minutes), "--json", str(file)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=HANG_GUARD_S)
    figures = json.loads(file.read_text())
    assert figures["minutes"] >= minutes
    assert figures["times compared"] > 200 * minutes
    of_aligner, of_letters = figures["aligner, ms"], figures["by letters, ms"]
    assert of_aligner["median"] <= MEDIAN_MS, figures
    assert of_aligner["p95"] <= P95_MS, figures
    assert of_aligner["largest"] <= LARGEST_MS, figures
    assert of_letters["median"] > 10 * of_aligner["median"]


def test_a_sound_has_the_same_times_beside_others() -> None:
    engine = load_engine(AlignerSettings(model=ALIGNER, device="cpu"))
    draw = np.random.default_rng(0)
    words = ["the old king", "seven", "likes boats in the morning"]
    sounds = [
        Sound((draw.standard_normal(round(size * RATE_HZ)) * 0.1).astype(np.float32), text.split())
        for size, text in zip((2.5, 0.7, 5.1), words, strict=True)
    ]

    async def align() -> tuple[list[object], list[object]]:
        together = await asyncio.gather(*map(engine.align, sounds))
        return list(together), [await engine.align(sound) for sound in sounds]

    together, alone = asyncio.run(align())
    engine.close()
    assert together == alone
