"""The model's half that is called at each denoising step."""

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config  # pyright: ignore[reportUnknownVariableType]
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from services.families.bagel.latents import PATCH, LatentStates
from services.families.bagel.mot import Mot
from services.families.bagel.sizes import BagelSizes


class BagelDenoiser(ModelMixin, ConfigMixin):
    """Velocities of noisy latents behind a context. In one process with the reader it has the reader's weights.

    Args:
        sizes: fields of `BagelSizes`.
    """

    _repeated_blocks = ["MotLayer"]  # noqa: RUF012  # diffusers reads a list

    @register_to_config
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = BagelSizes.of(sizes)
        hidden, channels = self.sizes.mot.hidden_size, self.sizes.latent_channels
        self.mot, self.latents = Mot(self.sizes.mot), LatentStates(hidden, channels, self.sizes.latent_side)
        self.llm2vae = nn.Linear(hidden, PATCH * PATCH * channels)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        grid: Tensor,
        position: Tensor,
        context: Tensor,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Velocities from data to noise, as `hidden_states`. A row depends on no other row.

        Args:
            hidden_states: noisy latents, (rows, tokens, PATCH * PATCH * channels).
            timestep: (rows,), float32, from 1, noise, to 0.
            grid: places of the tokens, (rows, tokens), int64.
            position: of rope, of all of a row's tokens, (rows,), int64.
            context: what has been read, (rows, length, context_width), padded at the end.
            context_mask: (rows, length), nonzero where it is no padding; None: nowhere.
        """
        rows = len(context)
        marks = self.mot.embed_tokens(torch.tensor(self.sizes.marks, device=hidden_states.device))
        first, last = marks[:, None, None].expand(2, rows, 1, -1)
        states = torch.cat([first, self.latents(hidden_states, grid, timestep), last], dim=1)
        positions = position[:, None].expand(rows, states.shape[1])
        mask = None
        if context_mask is not None:
            own = torch.ones(rows, states.shape[1], dtype=torch.bool, device=states.device)
            mask = torch.cat([context_mask.bool(), own], dim=1)[:, None, None]
        states, _ = self.mot(states, positions, context, mask, True)
        return self.llm2vae(states[:, 1:-1])
