"""Reads a checkpoint in the published format: sizes of its config files and tensors, and weights."""

from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # pyright: ignore[reportMissingTypeStubs]
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn
from transformers import Qwen2Tokenizer

from services.families.bagel.denoiser import BagelDenoiser
from services.families.bagel.files import LLM, MARKS, VAE_WEIGHTS, VISION, WEIGHTS, read
from services.families.bagel.latents import PATCH
from services.families.bagel.mot import MotSizes
from services.families.bagel.names import published, published_vae
from services.families.bagel.reader import BagelReader
from services.families.bagel.sizes import BagelSizes, sides_of, vision_of
from services.families.bagel.tensor_file import TensorFile

SCALING, SHIFT = 0.3611, 0.1159  # of FLUX.1's latents; no file says them
VAE_LEVELS = 4  # it scales by 8


class BagelCheckpoint:
    """A folder with the published files. Reads no weights but those asked for.

    Attributes:
        sizes: of the model.
        vae: arguments of diffusers' AutoencoderKL.
        tokenizer: as published.

    Raises:
        ValueError: names the file, key or tensor that is missing, or what the model has that is not served.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if missing := [name for name in (LLM, VISION, WEIGHTS, VAE_WEIGHTS) if not (folder / name).is_file()]:
            raise ValueError(f"{folder} has no {missing[0]}: the checkpoint is not whole")
        tokenizers: Any = Qwen2Tokenizer
        self.tokenizer: Any = tokenizers.from_pretrained(folder)
        self.sizes, self.vae = self._sizes(), self._vae()

    def _sizes(self) -> BagelSizes:
        llm = read(self.folder, LLM)
        if (activation := llm.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"{self.folder / LLM}: hidden_act is {activation!r}; silu is served")
        marks = [self.tokenizer.convert_tokens_to_ids(token) for token in MARKS]
        if None in marks:
            raise ValueError(f"{self.folder}: its tokenizer has no {MARKS[marks.index(None)]}")
        with TensorFile(self.folder / WEIGHTS) as stored:
            return BagelSizes(
                MotSizes(**{name: llm[name] for name in MotSizes.__dataclass_fields__}),
                vision_of(self.folder, stored),
                (marks[0], marks[1]),
                stored.shape("vae2llm.weight")[1] // PATCH**2,
                *sides_of(stored),
                llm["max_position_embeddings"],
            )

    def _vae(self) -> dict[str, Any]:
        with TensorFile(self.folder / VAE_WEIGHTS) as stored:
            widths = [stored.shape(f"encoder.down.{i}.block.0.conv1.weight")[0] for i in range(VAE_LEVELS)]
            first = (f"encoder.down.0.block.{i}.conv1.weight" for i in range(len(stored.names)))
            blocks = sum(name in stored.names for name in first)
            return vae_arguments(tuple(widths), blocks, stored.shape("decoder.conv_in.weight")[1])

    def dtype(self) -> torch.dtype:
        """Of the stored weights."""
        with TensorFile(self.folder / WEIGHTS) as stored:
            return stored.dtype("llm2vae.weight")

    def empty(self, names: Collection[str], dtype: torch.dtype) -> dict[str, nn.Module]:
        """Models without weights, on torch's device "meta", by components' names."""
        sizes = asdict(self.sizes)
        vae_class: Any = AutoencoderKL
        makers: dict[str, Callable[[], nn.Module]] = {
            "text_encoder": lambda: BagelReader(sizes, self.vae),
            "transformer": lambda: BagelDenoiser(sizes),
            "vae": lambda: vae_class(**self.vae),
        }
        with init_empty_weights(include_buffers=True):
            # not the models' own `to`, which warns of models that keep float32
            return {name: nn.Module.to(make(), dtype=dtype) for name, make in makers.items() if name in names}

    def load(self, names: Collection[str], dtype: torch.dtype) -> dict[str, nn.Module]:
        """Models with weights, on the CPU. They share what several of them have.

        Raises:
            ValueError: names a tensor that is missing, or that has another shape.
        """
        made = self.empty(names, dtype)
        shared: dict[str, nn.Parameter] = {}
        with TensorFile(self.folder / WEIGHTS) as weights, TensorFile(self.folder / VAE_WEIGHTS) as vae:
            for component, model in made.items():
                for own, empty in model.state_dict().items():
                    is_vae = component == "vae" or own.startswith("encoder.")
                    name = published_vae(own, VAE_LEVELS) if is_vae else published(own)
                    if name not in shared:
                        tensor = (vae if is_vae else weights).tensor(name, dtype, empty.shape)
                        shared[name] = nn.Parameter(tensor, requires_grad=False)
                    path, _, last = own.rpartition(".")
                    setattr(model.get_submodule(path), last, shared[name])
        return {name: model.eval().requires_grad_(False) for name, model in made.items()}


def vae_arguments(widths: tuple[int, ...], blocks: int, latent_channels: int) -> dict[str, Any]:
    """Of diffusers' AutoencoderKL for a VAE such as FLUX.1's: widths of its levels, and blocks of each that encodes."""
    return {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "layers_per_block": blocks,
        "latent_channels": latent_channels,
        "sample_size": 1024,  # of tiles
        "scaling_factor": SCALING,
        "shift_factor": SHIFT,
        "force_upcast": False,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
