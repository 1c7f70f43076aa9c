"""Reads texts and pictures into a context: the keys and values of all tokens so far."""

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config  # pyright: ignore[reportUnknownVariableType]
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from services.families.bagel.latents import PATCH, LatentStates, grid_of, to_tokens
from services.families.bagel.mot import Mot
from services.families.bagel.sizes import BagelSizes
from services.families.bagel.vision import Connector, Vision


class BagelReader(ModelMixin, ConfigMixin):
    """The model's half that reads: what is before the first denoising step, and thoughts.

    Args:
        sizes: fields of `BagelSizes`.
        vae: of latents; its encoder is read, and is part of this model.
    """

    @register_to_config
    def __init__(self, sizes: dict[str, Any], vae: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = BagelSizes.of(sizes)
        mot = self.sizes.mot
        self.mot, self.lm_head = Mot(mot), nn.Linear(mot.hidden_size, mot.vocab_size, bias=False)
        self.latents = LatentStates(mot.hidden_size, self.sizes.latent_channels, self.sizes.latent_side)
        self.vision = Vision(self.sizes.vision)
        self.connector = Connector(self.sizes.vision.hidden_size, mot.hidden_size, self.sizes.vision_side)
        vae_class: Any = AutoencoderKL
        self.encoder = vae_class(**vae).encoder
        self._scale, self._shift = vae["scaling_factor"], vae["shift_factor"]

    def empty(self) -> Tensor:
        """A context of nothing, (1, 0, context_width)."""
        return torch.empty(1, 0, self.sizes.mot.context_width, dtype=self.dtype, device=self.device)

    def forward(
        self,
        context: Tensor,
        position: int,
        ids: Tensor | None = None,
        pixels: Tensor | None = None,
        as_latents: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`context` with a text, or a picture, behind it.

        Args:
            context: (1, length, context_width).
            position: of rope, of the first token; a picture has one for all its tokens.
            ids: (tokens,), int64, of the text.
            pixels: (3, height, width), -1 to 1, of the picture: multiples of a patch.
            as_latents: whether the picture is read as latents of the VAE, not as patches. The latents are the mean of
                the VAE's distribution; the published program draws them from it.

        Returns:
            The context, (1, length + tokens, context_width), and logits behind the last token, (vocabulary,).
        """
        assert (ids is None) != (pixels is None)
        if pixels is not None:
            states = self._between_marks(self._latents(pixels) if as_latents else self._patches(pixels))
            positions = torch.full((1, states.shape[1]), position, device=context.device)
            mask = None
        else:
            states = self.mot.embed_tokens(ids)[None]
            positions = torch.arange(position, position + states.shape[1], device=context.device)[None]
            length, tokens = context.shape[1], states.shape[1]
            causal = torch.ones(tokens, length + tokens, dtype=torch.bool, device=context.device)
            mask = causal.tril(length) if tokens > 1 else None
        states, own = self.mot(states, positions, context, mask, as_latents)
        return torch.cat([context, own], dim=1), self.lm_head(states[0, -1])

    def _between_marks(self, states: Tensor) -> Tensor:
        first, last = self.mot.embed_tokens(torch.tensor(self.sizes.marks, device=states.device))[:, None]
        return torch.cat([first, states, last])[None]

    def _latents(self, pixels: Tensor) -> Tensor:
        """(tokens, hidden)."""
        mean = self.encoder(pixels[None].to(self.dtype)).chunk(2, dim=1)[0][0]
        tokens = to_tokens((mean - self._shift) * self._scale, PATCH)
        grid = grid_of(mean.shape[1] // PATCH, mean.shape[2] // PATCH, self.sizes.latent_side).to(pixels.device)
        return self.latents(tokens[None], grid[None], torch.zeros(1, device=pixels.device))[0]

    def _patches(self, pixels: Tensor) -> Tensor:
        """(patches, hidden)."""
        side = self.sizes.vision.patch_size
        grid = grid_of(pixels.shape[1] // side, pixels.shape[2] // side, self.sizes.vision_side).to(pixels.device)
        return self.connector(self.vision(to_tokens(pixels.to(self.dtype), side), grid), grid)
