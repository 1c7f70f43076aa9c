"""SigLIP's encoder for pictures of any shape, without its last layer, as BAGEL uses it."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

_HEADS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class VisionSizes:
    """Of the encoder, with the names of vit_config.json. `num_hidden_layers` counts the layer that is left out."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    layer_norm_eps: float
    num_positions: int


class VisionLayer(nn.Module):
    """A layer of the encoder."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.heads = sizes.num_attention_heads
        self.layer_norm1 = nn.LayerNorm(hidden, sizes.layer_norm_eps)
        self.self_attn = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in (*_HEADS, "out_proj")})
        self.layer_norm2 = nn.LayerNorm(hidden, sizes.layer_norm_eps)
        inner = sizes.intermediate_size
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(hidden, inner), "fc2": nn.Linear(inner, hidden)})

    def forward(self, states: Tensor) -> Tensor:
        normed = self.layer_norm1(states)
        parts = (self.self_attn[name](normed).unflatten(-1, (self.heads, -1)).transpose(0, 1) for name in _HEADS)
        read = functional.scaled_dot_product_attention(*parts).transpose(0, 1).flatten(1)
        states = states + self.self_attn["out_proj"](read)
        inner = functional.gelu(self.mlp["fc1"](self.layer_norm2(states)), approximate="tanh")
        return states + self.mlp["fc2"](inner)


class Vision(nn.Module):
    """The encoder of one picture."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(3 * sizes.patch_size**2, sizes.hidden_size)
        self.position_embedding = nn.Embedding(sizes.num_positions, sizes.hidden_size)
        self.layers = nn.ModuleList(VisionLayer(sizes) for _ in range(sizes.num_hidden_layers - 1))
        self.post_layernorm = nn.LayerNorm(sizes.hidden_size, sizes.layer_norm_eps)

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """States (patches, hidden) of patches (patches, values) at places (patches,) of the grid."""
        states = self.patch_embedding(patches) + self.position_embedding(grid)
        for layer in self.layers:
            states = layer(states)
        return self.post_layernorm(states)


class Connector(nn.Module):
    """Makes what the encoder sees tokens of the transformer. `side`: most patches, along a side."""

    def __init__(self, vision: int, hidden: int, side: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(vision, hidden), nn.Linear(hidden, hidden)
        self.positions = nn.Embedding(side * side, hidden)

    def forward(self, states: Tensor, grid: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(states), approximate="tanh")) + self.positions(grid)
