"""The table of diffusers' pipeline classes says what its program finds."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.classes.judging import described, judge_checkpoint
from tests.support.classes.makers import classes
from tests.support.classes.table import row
from tests.support.weights import unlisted
from tests.support.weights.unlisted import unlisted_checkpoint

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/diffusers-classes.md"
CHECKOUT = "QUARTET_DIFFUSERS_CHECKOUT"
"""A variable that names a checkout of diffusers' repository, which has the tests that make tiny checkpoints."""
SMALL = {"width": 64, "height": 64}


def rows(page: Path) -> dict[str, str]:
    return {found[1]: found[0] for found in re.finditer(r"^\| ([A-Z]\w+) \| .*$", page.read_text(), re.MULTILINE)}


@pytest.mark.long
def test_it_has_a_row_for_each_class_and_says_what_no_request_can_ask_for() -> None:
    told = rows(PAGE)
    known = classes()
    assert list(told) == list(known)
    refused = {name: row(described(name, reason)) for name, reason in known.items() if reason is not None}
    assert {name: told[name] for name in refused} == refused


@pytest.mark.weekly
@pytest.mark.parametrize("build", [unlisted.stable_diffusion, unlisted.perturbed_attention, unlisted.lumina2])
def test_rows_are_those_of_other_tiny_checkpoints(build: Callable[[], Any]) -> None:
    checkpoint = unlisted_checkpoint(build)
    name = {
        unlisted.stable_diffusion: "StableDiffusionPipeline",
        unlisted.perturbed_attention: "StableDiffusionPAGPipeline",
        unlisted.lumina2: "Lumina2Pipeline",
    }[build]
    assert row(judge_checkpoint(described(name, None), checkpoint, SMALL)) == rows(PAGE)[name]


@pytest.mark.weekly
def test_rows_are_those_of_the_tests_checkpoints(tmp_path: Path) -> None:
    if not (checkout := os.environ.get(CHECKOUT)):
        pytest.skip(f"the tests of diffusers are in no package of it; {CHECKOUT} names a checkout that has them")
    tried = ["StableDiffusionPipeline", "PixArtSigmaPipeline", "StableDiffusionPAGPipeline"]
    page = tmp_path / "page.md"
    program = [sys.executable, str(ROOT / "scripts/diffusers_classes.py"), checkout, *tried]
    subprocess.run([*program, "--kept", str(tmp_path), "--page", str(page)], check=True)
    assert [rows(page)[name] for name in tried] == [rows(PAGE)[name] for name in tried]
