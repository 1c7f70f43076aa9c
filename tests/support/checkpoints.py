"""Small random checkpoints, made once on a machine: see `kept`. A test that changes one copies it first."""

from pathlib import Path

import cli.tiny
import services.families
from cli.tiny import make_checkpoint
from tests.support.kept import kept_folder

SOURCE = [Path(cli.tiny.__file__).parent, *sorted(Path(services.families.__file__).parent.glob("*/tiny"))]


def omni_checkpoint(size: str = "tiny", seed: int = 0) -> Path:
    """One of Qwen3-Omni's architecture."""
    return kept_folder(lambda out: make_checkpoint(out, seed, size), "omni", size, seed, SOURCE)


def diffusion_checkpoint(arch: str, seed: int = 0, size: str = "tiny") -> Path:
    """One of a diffusion family."""

    def make(out: Path) -> None:
        make_checkpoint(out, seed, size, arch)

    return kept_folder(make, "diffusion", arch, size, seed, SOURCE)


def tts_checkpoint(arch: str, size: str = "tiny", seed: int = 0) -> Path:
    """One of Qwen3-TTS: `arch` is a name that `quartet tiny` knows."""

    def make(out: Path) -> None:
        make_checkpoint(out, seed, size, arch)

    return kept_folder(make, "tts", arch, size, seed, SOURCE)
