"""The thinker's configuration for vLLM, from the files that the published program reads. Imports no vLLM."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.families.bagel.files import LLM, VISION, VISION_EPS, WEIGHTS, read

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

    from services.families.bagel.tensor_file import TensorFile
    from services.families.bagel.vision import VisionSizes

    llm, vision = read(folder, LLM), read(folder, VISION)
    theta, half = llm.pop("rope_theta", 1_000_000.0), llm["hidden_size"] // llm["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": [half - 2, 1, 1]}
    of_llm: dict[str, Any] = llm | {"rope_parameters": rope, "tie_word_embeddings": False, "qk_norm": True}
    config.llm_config = Qwen2Config(**of_llm)
    config.text_config = config.llm_config  # where vLLM looks for the language model's sizes
    config.picture_marks = marks
    with TensorFile(folder / WEIGHTS) as stored:
        config.max_latent_size, config.vit_max_num_patch_per_side = (
            round(stored.shape(f"{name}_pos_embed.pos_embed")[0] ** 0.5) for name in ("latent", "vit")
        )
        positions = stored.shape("vit_model.vision_model.embeddings.position_embedding.weight")[0]
    stated = {name: vision[name] for name in VisionSizes.__dataclass_fields__ if name in vision}
    of_vision: dict[str, Any] = {"layer_norm_eps": VISION_EPS} | stated | {"num_positions": positions}
    config.vision_sizes = asdict(VisionSizes(**of_vision))
    return config
