"""A plain BAGEL of our own, for parity: one file, float32, no cache, no batch, nothing shared with the server's code.

The whole sequence is computed anew for every token and step. It was compared once with ByteDance-Seed/Bagel at commit
056b5fd, read and run outside this repository: docs/bagel.md says how, and with which numbers.

The model (arXiv:2505.14683): a Qwen2 with normalised queries and keys, of which every layer has two sets of weights.
Latents of the VAE go through one ("moe_gen"), text, the SigLIP encoder's patches and the marks around a picture through
the other; attention is shared. A picture has one rope position, and its tokens see each other.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

ANSWER_THOUGHTS = """You should first think about the reasoning process in the mind and then provide the user with the answer. 
The reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> answer here"""  # noqa: E501
PICTURE_THOUGHTS = """You should first think about the planning process in the mind and then generate the image. 
The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> image here"""
SCALE, SHIFT = 0.3611, 0.1159  # of latents, FLUX.1's
PATCH = 2  # latents a token, along a side


@dataclass(frozen=True)
class Segment:
    """A piece of a sequence. All of it sees what is before it.

    Attributes:
        states: (tokens, hidden).
        positions: (tokens,), of rope.
        made: (tokens,), whether a token goes through the weights for latents.
        causal: whether a token sees only those of the segment that are before it.
    """

    states: Tensor
    positions: Tensor
    made: Tensor
    causal: bool


@dataclass
class Context:
    """What a sequence begins with. `position`: the next one of rope."""

    segments: list[Segment] = field(default_factory=list)
    position: int = 0

    def copy(self) -> "Context":
        return Context(list(self.segments), self.position)


@dataclass(frozen=True)
class Settings:
    """As the published program's, with its defaults for pictures of text. `points` of time: one more than steps.
    `drawn`: whether the latents of a given picture are drawn, not the mean."""

    points: int = 50
    text_scale: float = 4.0
    image_scale: float = 1.5
    interval: tuple[float, float] = (0.4, 1.0)
    renorm: str = "global"
    renorm_min: float = 0.0
    shift: float = 3.0
    drawn: bool = False
    max_tokens: int = 1000


class Bagel:
    """A checkpoint in the published format, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.llm: dict[str, Any] = json.loads((folder / "llm_config.json").read_text())
        self.vit: dict[str, Any] = json.loads((folder / "vit_config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "ema.safetensors").items()}
        self.vae = {name: tensor.float() for name, tensor in load_file(folder / "ae.safetensors").items()}
        self.tokenizer: Any = transformers.Qwen2Tokenizer.from_pretrained(folder)
        names = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
        self.start, self.end, *self.marks = self.tokenizer.convert_tokens_to_ids(names)
        self.latent_side = round(len(self.weights["latent_pos_embed.pos_embed"]) ** 0.5)
        self.vit_side = round(len(self.weights["vit_pos_embed.pos_embed"]) ** 0.5)
        self.latent_channels = self.weights["vae2llm.weight"].shape[1] // PATCH**2

    @torch.no_grad()
    def make(
        self,
        given: Sequence[str | Image.Image],
        think: bool = False,
        understand: bool = False,
        size: tuple[int, int] = (1024, 1024),
        seed: int = 0,
        settings: Settings | None = None,
    ) -> tuple[str, Tensor | None]:
        """What the published `interleave_inference` makes, greedy.

        Args:
            given: texts and pictures in their order.
            think: whether a text is written first.
            understand: whether an answer is all that is made.
            size: (height, width) in pixels, if there are no pictures; else the last one's.

        Returns:
            The text written, and the picture, (height, width, 3), 0 to 1.
        """
        s, generator = settings or Settings(), torch.Generator().manual_seed(seed)
        whole, no_text, no_image = Context(), Context(), Context()
        if think:
            system = ANSWER_THOUGHTS if understand else PICTURE_THOUGHTS
            self.add_text(whole, system)
            self.add_text(no_image, system)
        for each in given:
            if isinstance(each, str):
                no_text = whole.copy()
                self.add_text(whole, each)
                self.add_text(no_image, each)
            else:
                picture = scaled(each.convert("RGB"), self.latent_side * 8 * PATCH, self.latent_side * 4 * PATCH, 16)
                if not understand:
                    self.add_latents(whole, picture, generator if s.drawn else None)
                self.add_patches(whole, picture)
                size, no_text = (picture.height, picture.width), whole.copy()
        text = self.write(whole, s.max_tokens) if think or understand else ""
        if understand:
            return text, None
        if think:
            self.add_text(whole, text)
        return text, self.draw(whole, no_text, no_image, size, generator, s)

    # Sequences.

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][list(ids)]

    def add_text(self, context: Context, text: str) -> None:
        ids = [self.start, *self.tokenizer.encode(text), self.end]
        positions = torch.arange(len(ids)) + context.position
        context.segments.append(Segment(self.embed(ids), positions, torch.zeros(len(ids), dtype=torch.bool), True))
        context.position += len(ids)

    def picture_segment(self, states: Tensor, position: int, made: bool) -> Segment:
        """`states` between the marks, all at one position."""
        first, last = self.embed(self.marks)[:, None]
        kinds = torch.tensor([False, *[made] * len(states), False])
        return Segment(torch.cat([first, states, last]), torch.full((len(states) + 2,), position), kinds, False)

    def add_latents(self, context: Context, picture: Image.Image, generator: torch.Generator | None) -> None:
        picture = scaled(picture, self.latent_side * 8 * PATCH, self.latent_side * 4 * PATCH, 16)
        mean, logvar = self.encode(pixels_of(picture)[None])[0].chunk(2)
        if generator is not None:
            mean = mean + torch.exp(0.5 * logvar) * torch.randn(mean.shape, generator=generator)
        states = self.latent_states(
            patches_of(SCALE * (mean - SHIFT), PATCH), picture.height, picture.width, torch.zeros(1)
        )
        context.segments.append(self.picture_segment(states, context.position, made=True))
        context.position += 1

    def add_patches(self, context: Context, picture: Image.Image) -> None:
        patch = self.vit["patch_size"]
        picture = scaled(picture, self.vit_side * patch, self.vit_side * patch * 16 // 70, patch)
        grid = torch.arange(picture.height // patch)[:, None] * self.vit_side + torch.arange(picture.width // patch)
        states = self.see(patches_of(pixels_of(picture), patch), grid.flatten())
        states = self.linear(F.gelu(self.linear(states, "connector.fc1"), approximate="tanh"), "connector.fc2")
        states = states + self.weights["vit_pos_embed.pos_embed"][grid.flatten()]
        context.segments.append(self.picture_segment(states, context.position, made=False))
        context.position += 1

    def latent_states(self, latents: Tensor, height: int, width: int, time: Tensor) -> Tensor:
        """Of latents (tokens, channels) of a picture of `height` x `width` pixels."""
        rows, columns = height // (8 * PATCH), width // (8 * PATCH)
        grid = torch.arange(rows)[:, None] * self.latent_side + torch.arange(columns)
        frequencies = torch.exp(-np.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        waves = time[:, None] * frequencies
        waves = torch.cat([waves.cos(), waves.sin()], dim=-1)
        timed = self.linear(F.silu(self.linear(waves, "time_embedder.mlp.0")), "time_embedder.mlp.2")
        return self.linear(latents, "vae2llm") + timed + self.weights["latent_pos_embed.pos_embed"][grid.flatten()]

    # The transformer.

    def linear(self, states: Tensor, name: str) -> Tensor:
        return F.linear(states, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, states: Tensor, name: str) -> Tensor:
        power = states.square().mean(-1, keepdim=True)
        return states * torch.rsqrt(power + self.llm["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """The last segment's states behind the last norm."""
        states = torch.cat([each.states for each in segments])
        made = torch.cat([each.made for each in segments])[:, None]
        owner = torch.cat([torch.full((len(each.states),), i) for i, each in enumerate(segments)])
        whole = torch.cat([torch.full((len(each.states),), not each.causal) for each in segments])
        order = torch.arange(len(states))
        seen = (order[:, None] >= order) | ((owner[:, None] == owner) & whole)
        width = self.llm["hidden_size"] // self.llm["num_attention_heads"]
        frequencies = self.llm["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.cat([each.positions for each in segments])[:, None].float() * frequencies
        for i in range(self.llm["num_hidden_layers"]):
            name = f"language_model.model.layers.{i}."
            both = [self.attend(states, f"{name}{{}}", kind, angles, width) for kind in ("", "_moe_gen")]
            query, key, value = (torch.where(made[..., None], b, a) for a, b in zip(*both, strict=True))
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
            read = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value).flatten(1)
            outs = [self.linear(read, f"{name}self_attn.o_proj{kind}") for kind in ("", "_moe_gen")]
            states = states + torch.where(made, outs[1], outs[0])
            outs = [self.feed(states, name, kind) for kind in ("", "_moe_gen")]
            states = states + torch.where(made, outs[1], outs[0])
        outs = [self.norm(states, f"language_model.model.norm{kind}") for kind in ("", "_moe_gen")]
        return torch.where(made, outs[1], outs[0])[-len(segments[-1].states) :]

    def attend(self, states: Tensor, name: str, kind: str, angles: Tensor, width: int) -> tuple[Tensor, ...]:
        """Queries, keys and values, (tokens, heads, width), of one set of weights."""
        states = self.norm(states, name.format(f"input_layernorm{kind}"))
        parts = [self.linear(states, name.format(f"self_attn.{part}_proj{kind}")) for part in "qkv"]
        query, key, value = (part.unflatten(-1, (-1, width)) for part in parts)
        turned = []
        for part, letter in ((query, "q"), (key, "k")):
            part = self.norm(part, name.format(f"self_attn.{letter}_norm{kind}"))
            first, second = part.chunk(2, dim=-1)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        return turned[0], turned[1], value

    def feed(self, states: Tensor, name: str, kind: str) -> Tensor:
        states = self.norm(states, f"{name}post_attention_layernorm{kind}")
        gate, up = (self.linear(states, f"{name}mlp{kind}.{part}_proj") for part in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"{name}mlp{kind}.down_proj")

    # What is made.

    def write(self, context: Context, max_tokens: int) -> str:
        """Greedy: the most likely token until the end of a turn; `max_tokens` with the first one, the turn's start."""
        ids = [self.start]
        while len(ids) < max_tokens:
            positions = torch.arange(len(ids)) + context.position
            own = Segment(self.embed(ids), positions, torch.zeros(len(ids), dtype=torch.bool), True)
            states = self.forward([*context.segments, own])[-1]
            token = int(self.linear(states, "language_model.lm_head").argmax())
            if token == self.end:
                break
            ids.append(token)
        return self.tokenizer.decode(ids).split("<|im_end|>")[0].split("<|im_start|>")[1]

    def draw(
        self,
        whole: Context,
        no_text: Context,
        no_image: Context,
        size: tuple[int, int],
        generator: torch.Generator,
        s: Settings,
    ) -> Tensor:
        tokens = size[0] * size[1] // (8 * PATCH) ** 2
        latents = torch.randn(tokens, self.latent_channels * PATCH**2, generator=generator)
        times = torch.linspace(1, 0, s.points)
        times = s.shift * times / (1 + (s.shift - 1) * times)
        for now, then in itertools.pairwise(times):
            velocity = self.velocity(whole, latents, size, now)
            if s.interval[0] < now <= s.interval[1] and s.text_scale > 1:
                others = [self.velocity(each, latents, size, now) for each in (no_text, no_image)]
                velocity = guided(velocity, *others, s)
            latents = latents - velocity * (now - then)
        rows, columns = (side // (8 * PATCH) for side in size)
        grid = latents.reshape(rows, columns, PATCH, PATCH, -1).permute(4, 0, 2, 1, 3)
        pixels = self.decode(grid.reshape(1, self.latent_channels, rows * PATCH, columns * PATCH) / SCALE + SHIFT)
        return (pixels[0] * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0)

    def velocity(self, context: Context, latents: Tensor, size: tuple[int, int], time: Tensor) -> Tensor:
        states = self.latent_states(latents, *size, time[None])
        own = self.picture_segment(states, context.position, made=True)
        return self.linear(self.forward([*context.segments, own])[1:-1], "llm2vae")

    # SigLIP, as published without its last layer.

    def see(self, patches: Tensor, grid: Tensor) -> Tensor:
        """States (patches, hidden) of patches (patches, values) at places of the grid."""
        name, heads = "vit_model.vision_model.", self.vit["num_attention_heads"]
        positions = self.weights[f"{name}embeddings.position_embedding.weight"][grid]
        states = self.linear(patches, f"{name}embeddings.patch_embedding") + positions
        for i in range(self.vit["num_hidden_layers"] - 1):
            layer = f"{name}encoder.layers.{i}."
            normed = self.layer_norm(states, f"{layer}layer_norm1")
            parts = [self.linear(normed, f"{layer}self_attn.{part}_proj").unflatten(-1, (heads, -1)) for part in "qkv"]
            scores = torch.einsum("qhd,khd->hqk", parts[0], parts[1]) / parts[0].shape[-1] ** 0.5
            read = torch.einsum("hqk,khd->qhd", scores.softmax(-1), parts[2]).flatten(1)
            states = states + self.linear(read, f"{layer}self_attn.out_proj")
            inner = self.linear(self.layer_norm(states, f"{layer}layer_norm2"), f"{layer}mlp.fc1")
            states = states + self.linear(F.gelu(inner, approximate="tanh"), f"{layer}mlp.fc2")
        return self.layer_norm(states, f"{name}post_layernorm")

    def layer_norm(self, states: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights[f"{name}.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(states, weight.shape, weight, bias, self.vit.get("layer_norm_eps", 1e-6))

    # FLUX.1's VAE.

    def conv(self, x: Tensor, name: str, **options: Any) -> Tensor:
        weight = self.vae[f"{name}.weight"]
        options = {"padding": weight.shape[-1] // 2, **options}
        return F.conv2d(x, weight, self.vae[f"{name}.bias"], **options)

    def group_norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 32, self.vae[f"{name}.weight"], self.vae[f"{name}.bias"], eps=1e-6)

    def residual(self, x: Tensor, name: str) -> Tensor:
        h = self.conv(F.silu(self.group_norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self.conv(F.silu(self.group_norm(h, f"{name}.norm2")), f"{name}.conv2")
        has_shortcut = f"{name}.nin_shortcut.weight" in self.vae
        return h + (self.conv(x, f"{name}.nin_shortcut") if has_shortcut else x)

    def middle(self, x: Tensor, name: str) -> Tensor:
        x = self.residual(x, f"{name}.mid.block_1")
        normed = self.group_norm(x, f"{name}.mid.attn_1.norm")
        query, key, value = (self.conv(normed, f"{name}.mid.attn_1.{part}").flatten(2)[0].T for part in "qkv")
        read = (query @ key.T / query.shape[1] ** 0.5).softmax(-1) @ value
        x = x + self.conv(read.T.reshape(x.shape), f"{name}.mid.attn_1.proj_out")
        return self.residual(x, f"{name}.mid.block_2")

    def blocks(self, x: Tensor, name: str) -> Tensor:
        i = 0
        while f"{name}.block.{i}.conv1.weight" in self.vae:
            x, i = self.residual(x, f"{name}.block.{i}"), i + 1
        return x

    def encode(self, pixels: Tensor) -> Tensor:
        """Mean and log variance, (1, 2 channels, height / 8, width / 8), of pixels (1, 3, height, width), -1 to 1."""
        x = self.conv(pixels, "encoder.conv_in")
        for i in range(4):
            x = self.blocks(x, f"encoder.down.{i}")
            if i < 3:
                x = self.conv(F.pad(x, (0, 1, 0, 1)), f"encoder.down.{i}.downsample.conv", stride=2, padding=0)
        return self.conv(F.silu(self.group_norm(self.middle(x, "encoder"), "encoder.norm_out")), "encoder.conv_out")

    def decode(self, latents: Tensor) -> Tensor:
        """The inverse, without variance."""
        x = self.middle(self.conv(latents, "decoder.conv_in"), "decoder")
        for i in reversed(range(4)):
            x = self.blocks(x, f"decoder.up.{i}")
            if i:
                x = self.conv(F.interpolate(x, scale_factor=2.0), f"decoder.up.{i}.upsample.conv")
        return self.conv(F.silu(self.group_norm(x, "decoder.norm_out")), "decoder.conv_out")


def guided(whole: Tensor, no_text: Tensor, no_image: Tensor, s: Settings) -> Tensor:
    """The velocity, guided by text and then by picture, not longer than it was."""
    by_text = no_text + s.text_scale * (whole - no_text)
    if s.renorm == "text_channel":
        by_text = by_text * shrinkage(whole, by_text, s, dim=-1)
        return no_image + s.image_scale * (by_text - no_image) if s.image_scale > 1 else by_text
    made = no_image + s.image_scale * (by_text - no_image) if s.image_scale > 1 else by_text
    return made * shrinkage(whole, made, s, dim=None if s.renorm == "global" else -1)


def shrinkage(whole: Tensor, made: Tensor, s: Settings, dim: int | None) -> Tensor:
    norms = [each.norm() if dim is None else each.norm(dim=dim, keepdim=True) for each in (whole, made)]
    return (norms[0] / (norms[1] + 1e-8)).clamp(min=s.renorm_min, max=1.0)


def scaled(picture: Image.Image, longest: int, shortest: int, stride: int) -> Image.Image:
    """With sides that are multiples of `stride`, if it can be none over `longest` and none under `shortest`."""

    def sizes(width: int, height: int, scale: float) -> tuple[int, int]:
        sides = (max(stride, round(round(side * scale) / stride) * stride) for side in (width, height))
        return tuple(sides)  # type: ignore[return-value]

    scale = max(min(longest / max(picture.size), 1.0), shortest / min(picture.size))
    size = sizes(*picture.size, scale)
    if max(size) > longest:
        size = sizes(*size, longest / max(size))
    return picture.resize(size, Image.Resampling.BICUBIC)


def pixels_of(picture: Image.Image) -> Tensor:
    """(3, height, width), -1 to 1."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 * 2 - 1


def patches_of(image: Tensor, side: int) -> Tensor:
    """(patches, side * side * channels) of (channels, height, width)."""
    channels, height, width = image.shape
    image = image.reshape(channels, height // side, side, width // side, side)
    return image.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)
