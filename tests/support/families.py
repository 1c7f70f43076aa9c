"""Diffusion families as parameters of tests that start a system or processes for each."""

import pytest

from cli.tiny import FAMILIES

OF_EACH_MEDIUM = ("sd3", "wan", "stable-audio")
"""A picture, a video and a sound: what every change is tested with. The other families' own code is diffusers', and
tests/stage/test_dit_parity.py runs all of them in one process."""

SLOW = "qwen-image-edit"
"""Its pictures are encoded at a million pixels, however small they are."""

IN_PROCESS = [pytest.param(family, marks=pytest.mark.long) if family == SLOW else family for family in FAMILIES]
"""All families, of which the slow one is left to make test-long."""

SYSTEMS = [family if family in OF_EACH_MEDIUM else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES]
