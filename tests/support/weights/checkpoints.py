"""Small random checkpoints, made once on a machine: see `kept`. A test that changes one copies it first."""

from pathlib import Path

import cli.tiny
import services.families
from cli.tiny import make_checkpoint
from tests.support.kept import kept_folder

_FAMILIES = Path(services.families.__file__).parent
SOURCE = [Path(cli.tiny.__file__).parent, *sorted(_FAMILIES.glob("tiny_*.py")), *sorted(_FAMILIES.glob("*/tiny"))]


def omni_checkpoint(size: str = "tiny", seed: int = 0, arch: str = "qwen3-omni") -> Path:
    """One with thinker, talker and code2wav: `arch` is a name that `quartet tiny` knows."""
    return kept_folder(lambda out: make_checkpoint(out, seed, size, arch), "omni", arch, size, seed, SOURCE)


def thinking_checkpoint(size: str = "tiny", seed: int = 0) -> Path:
    """One of Qwen3-Omni's thinker alone, which thinks before it answers."""

    def make(out: Path) -> None:
        make_checkpoint(out, seed, size, "qwen3-omni-thinking")

    return kept_folder(make, "thinking", size, seed, SOURCE)


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
