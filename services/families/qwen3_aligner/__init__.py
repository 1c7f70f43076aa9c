"""Qwen3-ForcedAligner, as transformers has it: a Qwen3-ASR that sorts a mark behind each word into classes of time."""


def only_stages(config: object) -> tuple[str, ...]:
    return ("aligner",)
