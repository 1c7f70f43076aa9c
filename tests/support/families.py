"""Diffusion families as parameters of tests that start a system or processes for each."""

import pytest

from cli.tiny import FAMILIES

SYSTEM = "sd3"
"""The family whose system every change is tested with. The others' own code is diffusers', and
tests/stage/test_dit_parity.py runs them in one process; `make test-long` starts a system for each."""

SLOW = ("qwen-image-edit", "glm-image")
"""The first one's pictures are encoded at a million pixels, however small they are; the second one has two models."""

IN_PROCESS = [pytest.param(family, marks=pytest.mark.long) if family in SLOW else family for family in FAMILIES]
"""All families, of which the slow ones are left to make test-long."""

SYSTEMS = [family if family == SYSTEM else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES]
