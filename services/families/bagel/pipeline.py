"""BAGEL as a pipeline class, in the form of diffusers': the dit stops it where it calls a model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils.outputs import BaseOutput
from diffusers.utils.torch_utils import randn_tensor  # pyright: ignore[reportUnknownVariableType]
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Tokenizer

from services.common.errors import require
from services.diffusion.own import OwnPipeline
from services.families.bagel.checkpoint import BagelCheckpoint
from services.families.bagel.context import THINK_FIRST, Contexts
from services.families.bagel.denoiser import BagelDenoiser
from services.families.bagel.guidance import Guidance
from services.families.bagel.latents import PATCH, from_tokens, grid_of
from services.families.bagel.pictures import for_latents
from services.families.bagel.reader import BagelReader
from services.families.bagel.sizes import PIXELS_A_LATENT

_PIXELS = PIXELS_A_LATENT * PATCH  # a token, along a side
MAX_THINK_TOKENS = 1000
_Part = str | Image.Image
_Encoded = tuple[Tensor, int, int, int, Tensor | None, int, str]


@dataclass
class BagelOutput(BaseOutput):
    """Pictures, as `output_type` says."""

    images: Any


class BagelPipeline(OwnPipeline):
    """Makes a picture of a text, or of pictures and a text.

    The published program is `InterleaveInferencer` of ByteDance-Seed/Bagel. Differences: the latents of a given picture
    are the mean of the VAE's distribution, not drawn from it, so a picture is read once for all seeds; and
    `num_inference_steps` counts steps; the published program counts the points of time, one more.

    Args:
        text_encoder: reads texts and pictures, and thinks.
        transformer: the denoiser.
        vae: of latents.
        scheduler: makes Euler's steps.
        tokenizer: of the checkpoint.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"
    files: ClassVar[tuple[str, ...]] = ("*.json", "*.txt", "ema.safetensors", "ae.safetensors")
    readers: ClassVar[tuple[str, ...]] = ("text_encoder",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "quantization": ("none",),  # the reader's weights are the denoiser's
        "offload": ("none", "model"),
        "attention_backend": (None,),
    }

    text_encoder: BagelReader
    transformer: BagelDenoiser
    vae: Any
    scheduler: Any
    tokenizer: Any

    def __init__(
        self,
        text_encoder: BagelReader,
        transformer: BagelDenoiser,
        vae: AutoencoderKL,
        scheduler: FlowMatchEulerDiscreteScheduler,
        tokenizer: Qwen2Tokenizer,
    ) -> None:
        super().__init__()
        modules: Any = self
        modules.register_modules(
            text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler, tokenizer=tokenizer
        )
        self.vae_scale_factor = PIXELS_A_LATENT
        self.image_processor = VaeImageProcessor(vae_scale_factor=PIXELS_A_LATENT)

    @classmethod
    def stored_dtype(cls, folder: Path) -> torch.dtype:
        return BagelCheckpoint(folder).dtype()

    @classmethod
    def empty_models(cls, folder: Path, names: Collection[str], dtype: torch.dtype) -> dict[str, nn.Module]:
        return BagelCheckpoint(folder).empty(names, dtype)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, given: dict[str, nn.Module]) -> "BagelPipeline":
        checkpoint = BagelCheckpoint(folder)
        names = {"text_encoder", "transformer", "vae"} - given.keys()
        models: dict[str, Any] = checkpoint.load(names, dtype) | given
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)  # times are shifted before they come here
        return cls(**models, scheduler=scheduler, tokenizer=checkpoint.tokenizer)

    def encode_prompt(self, before: list[_Part], prompt: str, think: bool, max_think_tokens: int) -> _Encoded:
        """Reads all that comes before the picture.

        Args:
            before: texts, and pictures, each read as latents and as patches.
            prompt: the text behind them.
            think: whether a text is written, greedily, before the picture.
            max_think_tokens: its most tokens, with the one that begins it.

        Returns:
            The context, (1, length, context_width), and the next position of rope; the same of that without prompt
            and thoughts, of which the first is the length that it has of the context; the context without pictures
            and thoughts, (1, length, context_width), or None if it is the first one, and its next position; the
            thoughts.
        """
        contexts = Contexts(self.text_encoder, self.tokenizer, self.kept)
        whole = contexts.new()
        if think:
            whole = contexts.text(whole, THINK_FIRST)
        no_text = no_image = whole
        for part in (*before, prompt):
            no_text = whole
            if isinstance(part, str):
                whole = contexts.text(no_text, part)
                no_image = whole if no_image is no_text else contexts.text(no_image, part)
            else:
                whole = contexts.picture(no_text, part)
        if no_image is whole and not think:
            no_image = None
        thoughts = contexts.write(whole, max_think_tokens, self.wrote) if think else ""
        if think:
            whole = contexts.text(whole, thoughts)
        length, other = no_text.states.shape[1], no_image or whole
        states = None if no_image is None else no_image.states
        return whole.states, whole.position, length, no_text.position, states, other.position, thoughts

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        context: list[_Part] | None = None,
        image: list[Image.Image] | Image.Image | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 49,
        guidance_scale: float = 4.0,
        image_guidance_scale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        guidance_renorm: str | None = None,
        guidance_renorm_min: float = 0.0,
        timestep_shift: float = 3.0,
        think: bool = False,
        max_think_tokens: int = MAX_THINK_TOKENS,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> BagelOutput:
        """Makes a picture.

        Args:
            prompt: what it shows, or how pictures are changed.
            context: a conversation of texts and pictures, read before all else.
            image: pictures, read after it and before the prompt.
            height, width: in pixels, multiples of 16; None: of the last picture as it is read, else the largest.
            num_inference_steps: Euler's steps.
            guidance_scale: by the text; up to 1: no guidance at all.
            image_guidance_scale: by what is not the text; None: the published program's, 1.5, and 2 for an edit.
            guidance_interval: over the first and up to the second of these times, from 0, the end, to 1, steps are
                guided; None: the published program's, (0.4, 1), and (0, 1) for an edit.
            guidance_renorm: see `guidance.Renorm`; None: the published program's, "global", and "text_channel" for an
                edit.
            guidance_renorm_min: the least part of its length that a guided velocity keeps.
            timestep_shift: over 1, more steps are near to the noise.
            think: whether a text is written before the picture.
            max_think_tokens: its most tokens.
            generator: of the noise.
            output_type: "pil", "np", "pt", or "latent", (1, channels, height / 8, width / 8).

        Raises:
            InvalidInput: names the further argument.
        """
        images = [] if image is None else list(image) if isinstance(image, (list, tuple)) else [image]
        before = [*(context or []), *images]
        pictures = [part for part in before if not isinstance(part, str)]
        edits = bool(pictures)
        guidance = Guidance(
            guidance_scale,
            image_guidance_scale if image_guidance_scale is not None else 2.0 if edits else 1.5,
            guidance_interval or ((0.0, 1.0) if edits else (0.4, 1.0)),
            guidance_renorm or ("text_channel" if edits else "global"),
            guidance_renorm_min,
        )
        require(0 < timestep_shift <= 100, "arguments.timestep_shift", "must be over 0 and at most 100")
        require(max_think_tokens > 0, "arguments.max_think_tokens", "must be at least 1")
        width, height = self._size(pictures, width, height)
        encoded = self.encode_prompt(before, prompt, think, max_think_tokens)
        self.wrote(encoded[-1])  # another output may have read it, or another process
        branches = self._branches(encoded)
        rows, columns = height // _PIXELS, width // _PIXELS
        sizes, device = self.transformer.sizes, self._execution_device
        grid = grid_of(rows, columns, sizes.latent_side).to(device)[None]
        noise = (1, rows * columns, PATCH * PATCH * sizes.latent_channels)
        latents = randn_tensor(noise, generator=generator, device=device, dtype=torch.float32)
        times = torch.linspace(1, 0, num_inference_steps + 1)[:-1]
        times = timestep_shift * times / (1 + (timestep_shift - 1) * times)
        self.scheduler.set_timesteps(sigmas=times.numpy().astype(np.float32), device=device)
        for time, step in zip(map(float, times), self.scheduler.timesteps, strict=True):
            velocity = self._velocity(latents, time, grid, branches, guidance)
            latents = self.scheduler.step(velocity, step, latents, return_dict=False)[0]
        found: Any = from_tokens(latents, rows, columns)
        if output_type != "latent":
            scaled = found / self.vae.config.scaling_factor + self.vae.config.shift_factor
            found = self.vae.decode(scaled.to(self.transformer.dtype), return_dict=False)[0]
            found = self.image_processor.postprocess(found.float(), output_type=output_type)
        return BagelOutput(images=found)

    def _size(self, images: list[Image.Image], width: int | None, height: int | None) -> tuple[int, int]:
        """(width, height), in pixels."""
        side = self.transformer.sizes.latent_side
        if width is None or height is None:
            read = for_latents(images[-1], side, _PIXELS).size if images else (side * _PIXELS, side * _PIXELS)
            width, height = width or read[0], height or read[1]
        return width, height

    def _branches(self, encoded: _Encoded) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts, padded, (branches, length, width), their masks, and positions, (branches,): the whole one, that
        without the text, and if it is another that without pictures."""
        whole, position, length, no_text, no_image, of_no_image, _ = encoded
        dtype, device = self.transformer.dtype, self._execution_device
        contexts = [whole, whole[:, :length], *([] if no_image is None else [no_image])]
        contexts = [each.to(dtype=dtype, device=device) for each in contexts]
        most = max(each.shape[1] for each in contexts)
        padded = torch.cat([functional.pad(each, (0, 0, 0, most - each.shape[1])) for each in contexts])
        lengths = torch.tensor([each.shape[1] for each in contexts], device=device)
        mask = (torch.arange(most, device=device) < lengths[:, None]).long()
        positions = torch.tensor([position, no_text, of_no_image][: len(contexts)], device=device)
        return padded, mask, positions

    def _velocity(
        self,
        latents: Tensor,
        time: float,
        grid: Tensor,
        branches: tuple[Tensor, Tensor, Tensor],
        guidance: Guidance,
    ) -> Tensor:
        """(1, tokens, channels), float32. All branches are one call."""
        contexts, mask, positions = branches
        count = len(contexts) if guidance.is_on(time) else 1
        made = self.transformer(
            hidden_states=latents.to(self.transformer.dtype).expand(count, -1, -1),
            timestep=torch.full((count,), time, device=latents.device),
            grid=grid.expand(count, -1),
            position=positions[:count],
            context=contexts[:count],
            context_mask=mask if count > 1 else None,  # the first is the longest
        ).float()
        if len(made) == 1:
            return made
        whole, no_text, *no_image = made
        return guidance.combine(whole, no_text, no_image[0] if no_image else whole)[None]
