"""Names of the checkpoints that come with Quartet. Their model cards say what they can do."""

from pathlib import Path

OMNI = "quartet-demo"  # thinker, talker and code2wav
PAINTER = "quartet-demo-painter"  # dit and encoder
ALIGNER = "quartet-demo-aligner"  # aligner
PAINTER_SIZE = "128x128"  # pixels; its training's

_HERE = Path(__file__).parent


def is_shipped(model: str) -> bool:
    """Whether `model` names a checkpoint here, and no directory."""
    return model in (OMNI, PAINTER, ALIGNER) and not Path(model).is_dir()


def resolve(model: str) -> str:
    """The directory of a checkpoint here; others unchanged."""
    return str(_HERE / model) if is_shipped(model) else model
