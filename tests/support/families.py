"""Diffusion families as parameters of tests that start a system or processes for each."""

from collections.abc import Iterator

import pytest

from cli.tiny import FAMILIES

SYSTEM = "sd3"
"""The family whose system every change is tested with. The others' own code is diffusers', and
tests/stage/test_dit_parity.py runs them in one process; `make test-weekly` starts a system for each."""

SLOW = ("qwen-image-edit", "glm-image")
"""The first one's pictures are encoded at a million pixels, however small they are; the second one has two models."""

IN_PROCESS = [pytest.param(family, marks=pytest.mark.long) if family in SLOW else family for family in FAMILIES]
"""All families, of which the slow ones are left to make test-long."""

SYSTEMS = [family if family == SYSTEM else pytest.param(family, marks=pytest.mark.weekly) for family in FAMILIES]


@pytest.fixture(scope="module")
def small_edits() -> Iterator[None]:
    """qwen-image-edit's pictures are encoded at 64 thousand pixels, by all pipelines of this process. At a million,
    as published, an edit takes seconds: tests/system/test_dit_http.py has that."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "VAE_IMAGE_SIZE", 256 * 256)
        yield
