"""Codec frames to samples, any number of frames at a time, for several streams at once. Exact: see `Decoder`."""

import torch
from torch import nn

from services.code2wav.layers import CausalConv, CausalTransposedConv, ConvNeXtBlock, DecoderBlock, SnakeBeta
from services.code2wav.spec import Code2WavSpec, read_spec
from services.code2wav.state import Batch, StreamStates
from services.code2wav.transformer import Transformer
from services.common.weights import Checkpoint

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
        self._state_shapes: list[tuple[int, ...]] = []
        hidden = spec.hidden
        self.code_embedding = nn.Embedding(spec.codebook_size * spec.num_code_groups, hidden)
        self.pre_transformer = Transformer(spec, self._new_buffer)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    CausalTransposedConv(hidden, hidden, ratio, ratio, self._new_buffer),
                    ConvNeXtBlock(hidden, self._new_buffer),
                ]
            )
            for ratio in spec.upsampling_ratios
        )
        widths = [spec.decoder_dim // 2**i for i in range(len(spec.upsample_rates) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(hidden, widths[0], 7, self._new_buffer),
                *(
                    DecoderBlock(width, rate, self._new_buffer)
                    for width, rate in zip(widths, spec.upsample_rates, strict=False)
                ),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, 7, self._new_buffer),
            ]
        )
        self._code_offsets: torch.Tensor
        offsets = torch.arange(spec.num_code_groups) * spec.codebook_size
        self.register_buffer("_code_offsets", offsets, persistent=False)

    def new_states(self, slots: int) -> StreamStates:
        """States of `slots` streams, on this module's device."""
        weight = self.code_embedding.weight
        return StreamStates(self._state_shapes, slots, weight.dtype, weight.device)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """Decodes the next frames of each stream of `batch` and advances its state.

        Args:
            codes: (streams, frames, groups), an integer dtype, on this module's device, each in [0, codebook size).

        Returns:
            For each stream its next samples, (n,), this module's dtype and device, -1 to 1: frames x
            samples_per_frame of them, less what is trimmed at the start of a stream.
        """
        frames = codes.shape[1]
        x = self.code_embedding(codes + self._code_offsets).mean(2)
        x = self.pre_transformer(x, batch).transpose(1, 2)
        for transposed, convnext in self.upsample:  # pyright: ignore[reportGeneralTypeIssues]
            x = convnext(transposed(x, batch), batch)
        first, *blocks, activation, last = self.decoder
        x = first(x, batch)
        for block, rate, lead in zip(blocks, self.spec.upsample_rates, self.spec.leads, strict=True):
            x = block(x, batch, _started(x, rate, lead, batch.frames, frames))
        wav = last(activation(x), batch).clamp(min=-1, max=1)[:, 0]

        size, trim = self.spec.samples_per_frame, self.spec.trimmed_samples
        samples = [row[max(0, trim - done * size) :] for row, done in zip(wav, batch.frames, strict=True)]
        batch.advance(frames)
        return samples

    def _new_buffer(self, shape: tuple[int, ...]) -> int:
        self._state_shapes.append(shape)
        return len(self._state_shapes) - 1


def _started(x: torch.Tensor, rate: int, lead: int, done: list[int], frames: int) -> torch.Tensor | None:
    """Where a block's output has begun: (streams, 1, samples) of x's dtype, 0 up to `lead` samples from the stream's
    start; None if all has.

    Args:
        x: the block's input, (streams, channels, n).
        done: frames that each stream had decoded before this step of `frames`.
    """
    per_frame = x.shape[-1] * rate // frames
    if min(done) * per_frame >= lead:
        return None
    starts = torch.tensor(done, device=x.device)[:, None, None] * per_frame
    return (starts + torch.arange(frames * per_frame, device=x.device) >= lead).to(x.dtype)


def load_decoder(model: str, dtype: str = "auto", device: str = "auto") -> Decoder:
    """The decoder of a checkpoint.

    Args:
        model: directory or hub id.
        dtype: name of a torch dtype, or "auto" for the one the checkpoint is stored in.
        device: a torch device, or "auto" for cuda if there is one, else cpu.

    Raises:
        ValueError: no such checkpoint, no code2wav in it, or tensors that are missing, unknown or of another shape.
    """
    checkpoint = Checkpoint(model, wanted=lambda name: name.startswith(PREFIX))
    decoder = Decoder(read_spec(checkpoint.folder))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint.tensors()}
    try:
        decoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{model}: {error}") from None
    stored = tensors["code_embedding.weight"].dtype
    decoder.to(dtype=stored if dtype == "auto" else getattr(torch, dtype))
    decoder.to(device=("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    decoder.requires_grad_(False).eval()
    for module in decoder.modules():
        if isinstance(module, SnakeBeta):
            module.precompute()
    return decoder
