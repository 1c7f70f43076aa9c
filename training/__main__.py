"""Trains, exports and scores the models that come with Quartet; README.md says in which order."""

import importlib
import warnings
from pathlib import Path

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
# What can be trained: the module and its function.
PARTS = {
    "code2wav": ("training.codec", "train"),
    "talker": ("training.talker", "train"),
    "hearing": ("training.hearing", "train"),
    "seeing": ("training.seeing", "train"),
    "painter_vae": ("training.painter", "train_vae"),
    "painter": ("training.painter", "train"),
    "paintings": ("training.paintings", "train"),
    "thinker": ("training.thinker", "train"),
    "tools": ("training.tools", "train"),
    "conversations": ("training.conversations", "train"),
    "aligner": ("training.aligner", "train"),
}


@app.command()
def train(part: str) -> None:
    """Train a part; ctrl-C stops it, and the same command goes on."""
    if part not in PARTS:
        raise typer.BadParameter(f"{part!r} is none of {', '.join(PARTS)}", param_hint="PART")
    from training.loop import TrainingInterrupt

    module, function = PARTS[part]
    try:
        getattr(importlib.import_module(module), function)()
    except TrainingInterrupt:
        raise typer.Exit(130) from None


@app.command()
def tokenizer() -> None:
    """Build the tokenizer again when the world has new words; then train talker, hearing, seeing and thinker again."""
    from services.demo_models import OMNI, resolve
    from training.shape import make_tokenizer

    make_tokenizer().save_pretrained(resolve(OMNI))


@app.command()
def restore() -> None:
    """Restore the shipped weights of each part of the Qwen3-Omni that has no state here, to train one part alone."""
    from training import export

    export.restore()


@app.command()
def export() -> None:
    """Write all checkpoints to services/demo_models. Model cards stay."""
    from training import export

    export.omni()
    export.painter()
    export.aligner()


@app.command()
def evaluate(count: int = 300, samples: Path | None = None) -> None:
    """Score both checkpoints: COUNT held-out questions of each sort, speech, images; five answers go to SAMPLES."""
    from training import evaluate

    evaluate.answers(count)
    evaluate.speech(samples=samples)
    evaluate.images()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    app()
