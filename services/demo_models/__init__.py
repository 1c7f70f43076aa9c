"""The checkpoints that come with Quartet, by name: a small Qwen3-Omni that knows a closed world, and a small Z-Image.

Their model cards, beside their weights, say what they can and what they cannot.
"""

from pathlib import Path

OMNI = "quartet-demo"  # thinker, talker and code2wav
PAINTER = "quartet-demo-painter"  # dit and encoder
PAINTER_SIZE = "128x128"  # pixels: what it was trained on

_HERE = Path(__file__).parent


def is_shipped(model: str) -> bool:
    """Whether `model` is the name of a checkpoint that is here, and of no directory that is nearer."""
    return model in (OMNI, PAINTER) and not Path(model).is_dir()


def resolve(model: str) -> str:
    """The directory of a checkpoint that is here; any other `model`, a directory or hub id, as it is."""
    return str(_HERE / model) if is_shipped(model) else model
