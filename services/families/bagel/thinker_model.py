"""BAGEL's understanding half on vLLM: its Qwen2, and the vision encoder for pictures of any shape.

vLLM's own class reads all pictures as squares of one size, without the marks around them, at positions of their own.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY

from services.families.bagel.files import WEIGHTS
from services.families.bagel.latents import grid_of
from services.families.bagel.names import published
from services.families.bagel.thinker_config import PICTURE
from services.families.bagel.thinker_pictures import LargestPictures, PictureInfo, PictureProcessor
from services.families.bagel.vision import Connector, Vision, VisionSizes

_LANGUAGE = "language_model."
_OF_PAINTING = "_moe_gen"  # weights that latents go through


@MULTIMODAL_REGISTRY.register_processor(PictureProcessor, info=PictureInfo, dummy_inputs=LargestPictures)
class BagelThinker(nn.Module, SupportsMultiModal, SupportsMRoPE, SupportsLoRA):
    """Texts and pictures in, text out. A picture's tokens share a position of rope, and see each other (the runner
    tells attention which they are: the model type is among vLLM's prefix language models)."""

    packed_modules_mapping = Qwen2ForCausalLM.packed_modules_mapping
    allow_patterns_overrides: ClassVar[list[str]] = [WEIGHTS]  # not the VAE's

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self._side, sizes = config.vit_max_num_patch_per_side, VisionSizes(**config.vision_sizes)
        self._marks = config.picture_marks
        with self._mark_language_model(vllm_config):
            self.language_model: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.llm_config,
                prefix=maybe_prefix(prefix, "language_model"),
                architectures=["Qwen2ForCausalLM"],
            )
        with self._mark_tower_model(vllm_config, "image"):
            self.vision = Vision(sizes)
            self.connector = Connector(sizes.hidden_size, config.llm_config.hidden_size, self._side)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return PICTURE
        raise ValueError(f"BAGEL takes no {modality}")

    @torch.inference_mode()
    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """(patches + 2, hidden) of each picture, marks included. `kwargs` are those of `PictureProcessor`."""
        patches, grids = kwargs.get("patches"), kwargs.get("grids")
        if patches is None or grids is None:
            return []
        device, dtype = self.vision.patch_embedding.weight.device, self.vision.patch_embedding.weight.dtype
        first, last = self.language_model.embed_input_ids(torch.tensor(self._marks, device=device))[:, None]
        shapes = [(int(rows), int(columns)) for rows, columns in grids.reshape(-1, 2)]
        made: list[Tensor] = []
        for values, (rows, columns) in zip(patches.split([a * b for a, b in shapes]), shapes, strict=True):
            places = grid_of(rows, columns, self._side).to(device)
            pixels = (values.to(device).float() / 255 * 2 - 1).to(dtype)
            made.append(torch.cat([first, self.connector(self.vision(pixels, places), places), last]))
        return made

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Rope positions of a prompt, (3, tokens) int64, and the offset of later tokens from their index."""
        steps = torch.ones(len(input_tokens), dtype=torch.int64)
        for feature in mm_features:
            begin, length = feature.mm_position.offset, feature.mm_position.length
            steps[begin + 1 : begin + length] = 0
        positions = steps.cumsum(0) - 1
        return positions.expand(3, -1), int(steps.sum()) - len(input_tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Of `ema.safetensors`, without those of painting. Returns the names, here, of what was loaded."""
        own = {name: each for name, each in self.named_parameters() if not name.startswith(_LANGUAGE)}
        names, loaded = {published(name): name for name in own}, set[str]()

        def of_language() -> Iterable[tuple[str, Tensor]]:
            for stored, tensor in weights:
                if stored in names:
                    name = names[stored]
                    default_weight_loader(own[name], tensor)
                    loaded.add(name)
                elif stored.startswith(_LANGUAGE) and _OF_PAINTING not in stored:
                    yield stored.removeprefix(_LANGUAGE), tensor

        of_llm: set[str] = self.language_model.load_weights(of_language())
        return loaded | {_LANGUAGE + name for name in of_llm}
