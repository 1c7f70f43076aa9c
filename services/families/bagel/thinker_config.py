"""The thinker's configuration for vLLM, from the files that the published program reads. Imports no vLLM."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.families.bagel.files import LLM, WEIGHTS, read

PICTURE = "<|image_pad|>"
ARCHITECTURE, MODEL_TYPE = "BagelForConditionalGeneration", "bagel"


def as_published(folder: Path, marks: tuple[int, int], config: Any) -> Any:
    """vLLM's configuration of the checkpoint in `folder`, with what the published program sets in its code.

    `marks` are the tokens around a picture.

    Queries and keys are normalised, the embeddings are not those of the output, and the vision encoder lacks its last
    layer (`Vision` knows). All tokens of a picture share a position of rope: vLLM takes positions of a model's own for
    M-RoPE alone, whose three rows are the same here. Most tokens along a picture's side are those of the tensors.
    """
    if config.model_type != MODEL_TYPE:  # vLLM asks about one without members, too
        return config
    from transformers import Qwen2Config

    from services.families.bagel.sizes import sides_of, vision_of
    from services.families.bagel.tensor_file import TensorFile

    llm = read(folder, LLM)
    theta, half = llm.pop("rope_theta", 1_000_000.0), llm["hidden_size"] // llm["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": [half - 2, 1, 1]}
    of_llm: dict[str, Any] = llm | {"rope_parameters": rope, "tie_word_embeddings": False, "qk_norm": True}
    config.llm_config = Qwen2Config(**of_llm)
    config.text_config = config.llm_config  # where vLLM looks for the language model's sizes
    config.picture_marks = marks
    with TensorFile(folder / WEIGHTS) as stored:
        config.max_latent_size, config.vit_max_num_patch_per_side = sides_of(stored)
        config.vision_sizes = asdict(vision_of(folder, stored))
    return config
