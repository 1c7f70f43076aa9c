"""Diffusion families as parameters of tests that start a system or processes for each."""

import pytest

from cli.tiny.diffusion import FAMILIES

OF_EACH_MEDIUM = ("sd3", "wan", "stable-audio")
"""A picture, a video and a sound: what every change is tested with. The other families' own code is diffusers', and
tests/parity runs all of them in one process."""

SYSTEMS = [family if family in OF_EACH_MEDIUM else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES]
