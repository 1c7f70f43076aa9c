"""Codec frames to samples, any number of frames at a time, for several streams at once. Exact: see `Decoder`."""

import torch
from torch import nn

from services.code2wav.layers import CausalConv, CausalTransposedConv, ConvNeXtBlock, DecoderBlock, SnakeBeta
from services.code2wav.spec import Code2WavSpec, read_spec
from services.code2wav.state import Batch, StateLayout, StreamStates
from services.code2wav.transformer import Attention, Transformer
from services.common.engine.device import disable_cudnn_attention, engine_device, make_current
from services.common.engine.weights import Checkpoint

PREFIX = "code2wav."


class Decoder(nn.Module):
    """Counterpart of transformers' Qwen3OmniMoeCode2Wav, with the same parameter names.

    For any split of a stream's frames into steps, whichever streams share its batches, the samples of the steps put
    together are those of one pass of the reference over all frames, up to rounding. Nothing is computed twice: layers
    carry what they look back on (`StreamStates`).
    """

    def __init__(self, spec: Code2WavSpec) -> None:
        super().__init__()
        self.spec = spec
        self.frames_computed = 0
        """Frames of all streams that went through the layers so far."""
        self.layout = StateLayout()
        hidden = spec.hidden
        self.code_embedding = nn.Embedding(spec.codebook_size * spec.num_code_groups, hidden)
        self.pre_transformer = Transformer(spec, self.layout)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    CausalTransposedConv(hidden, hidden, ratio, ratio, self.layout),
                    ConvNeXtBlock(hidden, self.layout),
                ]
            )
            for ratio in spec.upsampling_ratios
        )
        widths = [spec.decoder_dim // 2**i for i in range(len(spec.upsample_rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(hidden, widths[0], 7, self.layout),
                *(
                    DecoderBlock(width, rate, self.layout)
                    for width, rate in zip(widths, spec.upsample_rates, strict=False)
                ),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, 7, self.layout),
            ]
        )
        self._code_offsets: torch.Tensor
        offsets = torch.arange(spec.num_code_groups) * spec.codebook_size
        self.register_buffer("_code_offsets", offsets, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.code_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.code_embedding.weight.dtype

    def precompute(self) -> None:
        """To be called once the parameters are loaded."""
        for module in self.modules():
            if isinstance(module, SnakeBeta | CausalTransposedConv | Attention):
                module.precompute()

    def new_states(self, slots: int) -> StreamStates:
        """States of `slots` streams, on this module's device."""
        return StreamStates(self.layout, slots, self.dtype, self.device)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """Decodes the next frames of each stream of `batch` and advances its state.

        Args:
            codes: (streams, frames, groups), an integer dtype, on this module's device, each in [0, codebook size).

        Returns:
            For each stream its next samples, (n,), this module's dtype, on the CPU, -1 to 1: frames x
            samples_per_frame of them, less what is trimmed at the start of a stream.
        """
        positions = torch.tensor(batch.frames, device=codes.device)
        settled = min(batch.frames) >= self.spec.window - 1
        self.frames_computed += codes.shape[0] * codes.shape[1]
        wav, rows = self(codes, positions, batch.load(), self.at_start(batch), settled)
        batch.store(rows)
        return self.cut(wav, batch)

    def at_start(self, batch: Batch) -> bool:
        """Whether a stream of `batch` may still have samples that are trimmed off."""
        return min(batch.frames) * self.spec.samples_per_frame < self.spec.trimmed_samples

    def cut(self, wav: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """What a step gives each stream of `wav`, (streams, samples), which `forward` made; advances the batch."""
        size, trim = self.spec.samples_per_frame, self.spec.trimmed_samples
        samples = [row[max(0, trim - done * size) :] for row, done in zip(wav.cpu(), batch.frames, strict=True)]
        batch.advance(wav.shape[1] // size)
        return samples

    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, at_start: bool, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step, without any knowledge of slots and without side effects.

        Args:
            codes: (streams, frames, groups), an integer dtype.
            positions: (streams,) int64, frames of each stream before this step.
            rows: (streams, values a slot), their states.
            at_start: whether positions x samples_per_frame may be below the trimmed samples for some stream.
            settled: whether all positions are at least the attention window less one. It saves work, no more.

        Returns:
            Samples, (streams, frames x samples_per_frame), the trimmed ones included; and the states after the step.
        """
        frames = codes.shape[1]
        carry = self.layout.of(rows)
        x = self.code_embedding(codes + self._code_offsets).mean(2)
        x = self.pre_transformer(x, positions, carry, settled).transpose(1, 2)
        for transposed, convnext in self.upsample:  # pyright: ignore[reportGeneralTypeIssues]
            x = convnext(transposed(x, carry), carry)
        first, *blocks, activation, last = self.decoder
        x = first(x, carry)
        for block, rate, lead in zip(blocks, self.spec.upsample_rates, self.spec.leads, strict=True):
            x = block(x, carry, _started(x, rate, lead, positions, frames) if at_start else None)
        return last(activation(x), carry).clamp(min=-1, max=1)[:, 0], carry.rows()


def _started(x: torch.Tensor, rate: int, lead: int, positions: torch.Tensor, frames: int) -> torch.Tensor:
    """Where a block's output has begun: (streams, 1, samples) of x's dtype, 0 up to `lead` samples from the stream's
    start, else 1. As many samples as may be 0.

    Args:
        x: the block's input, (streams, channels, n).
        positions: frames that each stream had decoded before this step of `frames`.
    """
    per_frame = x.shape[-1] * rate // frames
    samples = torch.arange(min(lead, frames * per_frame), device=x.device)
    return (positions[:, None, None] * per_frame + samples >= lead).to(x.dtype)


def load_decoder(model: str, dtype: str = "auto", device: str = "auto") -> Decoder:
    """The decoder of a checkpoint.

    Args:
        model: directory or hub id.
        dtype: name of a torch dtype, or "auto" for the one the checkpoint is stored in.
        device: a torch device, or "auto" for cuda if there is one, else cpu.

    Raises:
        ValueError: no such device, no such checkpoint, no code2wav in it, or tensors that are missing, unknown or of
            another shape.
    """
    on = engine_device(device)
    make_current(on)
    disable_cudnn_attention()
    checkpoint = Checkpoint(model)
    checkpoint.select(lambda name: name.startswith(PREFIX))
    decoder = Decoder(read_spec(checkpoint.folder))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint.tensors()}
    try:
        decoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{model}: {error}") from None
    stored = tensors["code_embedding.weight"].dtype
    decoder.to(dtype=stored if dtype == "auto" else getattr(torch, dtype))
    decoder.to(device=on)
    if decoder.dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # on by default, and 1e-3 off
    decoder.requires_grad_(False).eval()
    decoder.precompute()
    return decoder
