"""The image model: a small Z-Image that generates one coloured shape on a coloured ground.

Two parts: its autoencoder, then its transformer, by flow matching (Lipman et al., 2022) on the latents of rendered
images. The prompt's encoder is a random Qwen3 that is not trained: it only has to tell words apart.
"""

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import nn
from torch.nn import functional

from training import loop
from training.prompts import ImagePrompt, draw_image_prompt
from training.scenes import SIDE

VAE_STEPS, STEPS = 4_000, 4_600
VAE_RATE, RATE, MUON_RATE = 4e-3, 3e-3, 4e-3
VAE_BATCH, BATCH = 8, 32
BANK = 16_384  # prompts that are drawn and encoded before the transformer's training: steps are fast then
LATENT_CHANNELS = 8  # half of what is published: less noise for so small a transformer to carry
VAE_NOISE = 0.4  # highest standard deviation of what is added to latents: the transformer leaves some, too
SHIFT = 3.0  # of the noise schedule, as published
UNCONDITIONAL = 0.15  # share of training's prompts that are left empty, for guidance
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@cache
def tokenizer() -> Any:
    """A byte-level BPE in which the prompts' words are one token each."""
    from cli.tiny.parts import qwen_tokenizer

    draw = random.Random(0)
    words = sorted({word for _ in range(5_000) for word in _pieces(draw_image_prompt(draw).prompt)})
    return qwen_tokenizer(600, tuple(words))


def _pieces(text: str) -> list[str]:
    words = text.rstrip(".").replace(",", "").split()
    return [words[0], *(f" {word}" for word in words)]


@cache
def text_encoder() -> Any:
    """Random, and the same each time: attention hardly mixes the words' embeddings."""
    from transformers import Qwen3Config, Qwen3Model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model: Any = Qwen3Model(Qwen3Config(vocab_size=len(tokenizer()), **TEXT)).eval().requires_grad_(False)
        model.embed_tokens.weight.normal_()
        for p in model.layers.parameters():
            if p.ndim == 2:
                p.normal_(std=0.3 / p.shape[1] ** 0.5)
    return model


@torch.no_grad()
def read(prompts: list[str]) -> list[torch.Tensor]:
    """Each prompt as the pipeline encodes it: (tokens, width)."""
    templated = [
        tokenizer().apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    ids = tokenizer()(templated, padding=True, padding_side="right", return_tensors="pt")
    states = text_encoder()(**ids, output_hidden_states=True).hidden_states[-2]
    return [state[mask.bool()] for state, mask in zip(states, ids["attention_mask"], strict=True)]


def build_vae() -> Any:
    """Builds the autoencoder: 8 pixels a side to a latent, as published."""
    autoencoder: Any = AutoencoderKL  # its annotations have tuples of one
    return autoencoder(
        block_out_channels=(8, 16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,  # more would take the colour out of a plain ground
        sample_size=SIDE,
        scaling_factor=1.0,
        shift_factor=0.0,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer() -> Any:
    return ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=120,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT["hidden_size"],
        axes_dims=[6, 12, 12],
        axes_lens=[1536, 512, 512],
    )


def pixels(prompts: list[ImagePrompt]) -> torch.Tensor:
    """Renders (images, 3, SIDE, SIDE) in -1 to 1."""
    images = np.stack([np.asarray(prompt.render()) for prompt in prompts])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae() -> None:
    """Trains the autoencoder: `VAE_STEPS` steps, resumable."""
    torch.manual_seed(0)
    model = build_vae().to(memory_format=torch.channels_last)  # a fifth less time
    for name, weight in model.named_parameters():  # a linear map at first, from which it learns several times faster
        if weight.ndim == 4:
            nn.init.normal_(weight, std=0.0 if "conv2" in name else weight[0].numel() ** -0.5)
    optimizers = loop.Optimizers(model, VAE_RATE, outer=("",))

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"vae {step}")
        wanted = pixels([draw_image_prompt(draw) for _ in range(VAE_BATCH)])
        for i, image in enumerate(wanted):  # places, and in half of them colours, that the image model does not know
            other = image[draw.sample(range(3), 3)] * draw.choice((1, -1)) * draw.uniform(0.5, 1)
            image.copy_((other if i % 2 else image).roll([draw.randrange(SIDE) for _ in range(2)], (1, 2)))
        side = SIDE if step % 8 == 0 else SIDE // 2  # a quarter of a image is a quarter of the time
        wanted = wanted[:, :, :side, :side].contiguous(memory_format=torch.channels_last)
        latents = model.encode(wanted).latent_dist
        noise = VAE_NOISE * torch.rand(VAE_BATCH, 1, 1, 1) * torch.randn_like(latents.mean)
        decoded = model.decode(latents.mean + noise).sample
        error = functional.l1_loss(decoded, wanted) + functional.mse_loss(decoded, wanted)
        # the first three channels are the image in small, which is easy to generate and to decode
        small = functional.mse_loss(latents.mean[:, :3], 1.5 * functional.avg_pool2d(wanted, 8))
        # unit variance and no correlation are not required; far from zero is not allowed
        size = latents.mean.pow(2).mean()
        logvar = latents.logvar.pow(2).mean()  # is not used, and must not grow
        loss = error + small + 0.005 * (size - 1).abs() + 1e-4 * logvar
        return loss, {"error": error.item(), "small": small.item(), "latents": size.item()}

    loop.run("painter_vae", model, optimizers, VAE_STEPS, step_loss)


class Painter(nn.Module):
    """The reference's transformer with its training loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer: Any = build_transformer()
        self._vae: list[Any] = []

    def forward(self, latents: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Flow matching's loss of clean `latents` (images, channels, side, side)."""
        noise = torch.randn_like(latents)
        chance = (torch.randperm(len(latents)) + torch.rand(len(latents))) / len(latents)  # evenly spread
        sigma = (SHIFT * chance / (1 + (SHIFT - 1) * chance))[:, None, None, None]
        noisy = (1 - sigma) * latents + sigma * noise
        predicted = self.transformer([each[:, None] for each in noisy], 1 - sigma.flatten(), read(prompts))[0]
        return functional.mse_loss(torch.stack(list(predicted)).squeeze(2), latents - noise)


@torch.no_grad()
def statistics() -> tuple[Any, float, float]:
    """The trained autoencoder, and its latents' standard deviation and mean."""
    vae = loop.load("painter_vae", build_vae())
    draw = random.Random("statistics")
    latents = torch.cat(
        [vae.encode(pixels([draw_image_prompt(draw) for _ in range(16)])).latent_dist.mean for _ in range(8)]
    )
    return vae, latents.std().item(), latents.mean().item()


@torch.no_grad()
def bank(vae: Any, prompts: list[ImagePrompt]) -> torch.Tensor:
    """The latents of `prompts` (prompts, channels, side, side), float16, cached beside the states."""
    file = loop.OUT / "painter_bank.pt"
    ends = vae.encode(pixels([prompts[0], prompts[-1]])).latent_dist.mean.half()
    if file.exists():
        kept = torch.load(file, weights_only=True)
        if len(kept) == len(prompts) and torch.allclose(kept[[0, -1]], ends, atol=0.01):
            return kept
    encoded: list[torch.Tensor] = []
    for begin in range(0, len(prompts), 64):
        encoded.append(vae.encode(pixels(prompts[begin : begin + 64])).latent_dist.mean.half())
        if begin % 2048 == 0:
            print(f"painter: {begin} of {len(prompts)} prompts drawn and encoded", flush=True)
    latents = torch.cat(encoded)
    torch.save(latents, file)
    return latents


def train() -> None:
    """Trains the transformer: `STEPS` steps, resumable."""
    vae, deviation, mean = statistics()
    draw = random.Random("bank")
    prompts = [draw_image_prompt(draw) for _ in range(BANK)]
    latents = bank(vae, prompts)
    torch.manual_seed(0)
    model = Painter()
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "final", "adaLN", "pad_token"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"painter {step}")
        chosen = [draw.randrange(BANK) for _ in range(BATCH)]
        texts = ["" if draw.random() < UNCONDITIONAL else prompts[i].prompt for i in chosen]
        return model((latents[chosen].float() - mean) / deviation, texts), {}

    loop.run("painter", model, optimizers, STEPS, step_loss)
