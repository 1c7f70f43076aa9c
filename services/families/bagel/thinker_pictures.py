"""Pictures of a prompt, for vLLM: how many tokens each is, and its patches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
)

from services.families.bagel.files import MARKS
from services.families.bagel.latents import PATCH, to_tokens
from services.families.bagel.pictures import for_latents, for_patches
from services.families.bagel.sizes import PIXELS_A_LATENT
from services.families.bagel.thinker_config import PICTURE

_PIXELS = PIXELS_A_LATENT * PATCH  # a token of latents, along a side


class PictureInfo(BaseProcessingInfo):
    """What the configuration says of pictures."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": self.get_hf_config().vit_max_num_patch_per_side ** 2 + len(MARKS)}

    def ids(self, *tokens: str) -> list[int]:
        return [self.get_tokenizer().get_vocab()[token] for token in tokens]


class LargestPictures(BaseDummyInputsBuilder[PictureInfo]):
    """Pictures with the most tokens, by which vLLM measures memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return PICTURE * mm_counts.get("image", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        side = self.info.get_hf_config().max_latent_size * _PIXELS
        return {"image": self._get_dummy_images(width=side, height=side, num_images=mm_counts.get("image", 0))}


class PictureProcessor(BaseMultiModalProcessor[PictureInfo]):
    """Scales pictures as the published program does, which reads them first at the size of their latents. A picture is
    its patches between two marks; in a prompt one token stands for it."""

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]) -> BatchFeature:
        """`patches`: (patches of all pictures, values), uint8; `grids`: (pictures, 2), rows and columns of each."""
        config = self.info.get_hf_config()
        side = config.vision_sizes["patch_size"]
        patches, grids = list[torch.Tensor](), list[list[int]]()
        for given in hf_data["images"]:
            picture = for_latents(Image.fromarray(np.asarray(given)), config.max_latent_size, _PIXELS)
            picture = for_patches(picture, config.vit_max_num_patch_per_side, side)
            patches.append(to_tokens(torch.tensor(np.array(picture)).permute(2, 0, 1), side))
            grids.append([picture.height // side, picture.width // side])
        return BatchFeature({"patches": torch.cat(patches), "grids": torch.tensor(grids)})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        found: dict[str, Any] = dict(hf_inputs)
        grids = found.get("grids", torch.empty(0, 2, dtype=torch.int64))
        return {
            "patches": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "grids": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        """The marks are embedded with the patches: vLLM lets all that is embedded see each other."""
        first, last, picture = self.info.ids(*MARKS, PICTURE)
        grids: Any = out_mm_kwargs.get_data().get("grids")

        def tokens(index: int) -> list[int]:
            return [first, *[picture] * int(grids[index].prod()), last]

        return [PromptReplacement("image", [picture], tokens)]
