"""What an aligner takes of a GPU."""

from dataclasses import replace
from typing import Any

from cli.budget import CONTEXT_BYTES, Demand, Need
from cli.sizes import BudgetError, read_sizes
from services.registry import ALIGNER


def with_aligner(demand: Demand, settings: Any) -> Demand:
    """Adds an aligner with these `AlignerSettings`. Raises BudgetError."""
    sizes = read_sizes(settings.model)
    if (weights := sizes.weights.get(ALIGNER)) is None:
        raise BudgetError(f"--aligner-model {settings.model}: is no aligner; give a Qwen3-ForcedAligner, say")
    sound_s = settings.max_batch_audio_s
    if settings.max_audio_s is not None:  # a sound alone may have more than a step of several
        sound_s = max(settings.max_audio_s, min(sound_s, settings.max_batch_sounds * settings.max_audio_s))
    step = int(sound_s * sizes.sound_step_per_s)
    need = Need(weights, CONTEXT_BYTES, step, f"a step of {sound_s:g} s of sound (--max-batch-audio-s)")
    chosen = settings.max_batch_audio_s if "max_batch_audio_s" in settings.model_fields_set else None
    return replace(demand, fixed={**demand.fixed, ALIGNER: need}, aligner_step_s=chosen)
