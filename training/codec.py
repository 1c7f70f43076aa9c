"""The codec: encodes a frame of a voice as 16 codes; code2wav decodes them.

Encoder (of training only): the log-mel spectrogram of a frame, in 8 columns, scaled to equal variances on its principal
axes, then residual quantization: 16 codebooks of k-means centres, each of what the ones before it left (Zeghidour et
al., "SoundStream", 2021, section III-C; there the encoder is learnt).
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from training import loop
from training.shape import SIZES, build
from training.units import FRAME_SAMPLES, RATE_HZ, VOICES, unit, vocabulary

STEPS = 3_300
RATE = 2e-3
BATCH, FRAMES = 4, 14
_COLUMNS, _MELS = 8, 40
_ROUNDS = 20  # of k-means
_WRONG = 0.1  # share of training's frames whose finest codebooks say something else
_FINE = 5  # codebooks from this one on
_FFTS = (320, 800, 2048)


@cache
def mel_filters(bins: int, mels: int) -> torch.Tensor:
    """Triangular filters, (mels, bins) float32, over frequencies from 0 to RATE_HZ / 2."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(bins, mels, 0.0, RATE_HZ / 2, RATE_HZ, norm="slaney", mel_scale="slaney")
    return torch.tensor(filters.T, dtype=torch.float32)


def spectrum(samples: torch.Tensor, size: int) -> torch.Tensor:
    """Magnitudes of short-time Fourier transforms, four a window: (..., bins, columns)."""
    window = torch.hann_window(size)
    padded = functional.pad(samples, (size // 2, size // 2))
    return torch.stft(padded, size, size // 4, window=window, center=False, return_complex=True).abs()


def frames_of(samples: np.ndarray) -> torch.Tensor:
    """Encoder input of each frame: (frames, _COLUMNS * _MELS) log-mel energies."""
    hop = FRAME_SAMPLES // _COLUMNS
    padded = functional.pad(torch.from_numpy(samples), (hop, hop))
    columns = torch.stft(padded, 1024, hop, win_length=3 * hop, window=torch.hann_window(3 * hop), return_complex=True)
    centred = columns[:, 1 : 1 + len(samples) // hop].abs()
    mel = (mel_filters(513, _MELS) @ centred).clamp_min(1e-4).log()
    return mel.T.reshape(len(samples) // FRAME_SAMPLES, -1)


def _residual_quantization(points: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Codes of `points` (points, width) under 16 codebooks that are fitted to them: (points, 16) int64."""
    left, codes = points, []
    for _ in range(SIZES.code_groups):
        centres = left[torch.randperm(len(left), generator=generator)[: SIZES.codebook]].clone()
        for _ in range(_ROUNDS):
            nearest = torch.cdist(left, centres).argmin(dim=1)
            counts = torch.bincount(nearest, minlength=SIZES.codebook).float()
            sums = torch.zeros_like(centres).index_add_(0, nearest, left)
            used = counts > 0
            centres[used] = sums[used] / counts[used, None]
            farthest = (
                torch.cdist(left, centres).amin(dim=1).topk(int((~used).sum())).indices if not used.all() else None
            )
            if farthest is not None:
                centres[~used] = left[farthest]
        nearest = torch.cdist(left, centres).argmin(dim=1)
        codes.append(nearest)
        left = left - centres[nearest]
    return torch.stack(codes, dim=1)


class Codes:
    """Codes of every word of the world's answers in both voices.

    Args:
        of: codes by "voice word last", each (frames, 16) int64.
    """

    file = loop.OUT / "codes.pt"

    def __init__(self, of: dict[str, torch.Tensor]) -> None:
        self._of = of

    def word(self, voice: str, word: str, last: bool) -> torch.Tensor:
        """Returns (frames, 16) int64. Raises KeyError: the vocabulary lacks the word."""
        return self._of[f"{voice} {word} {last}"]

    @classmethod
    def make(cls) -> "Codes":
        """Fits the codebooks and writes them to `file`."""
        keys = [(voice, word, last) for voice in VOICES for word, last in vocabulary()]
        frames = [frames_of(unit(*key)) for key in keys]
        points = torch.cat(frames)
        points = points - points.mean(dim=0)
        _, _, axes = torch.linalg.svd(points, full_matrices=False)
        points = points @ axes[:96].T
        codes = _residual_quantization(points, torch.Generator().manual_seed(0))
        pieces = codes.split([len(piece) for piece in frames])
        of = {f"{voice} {word} {last}": piece for (voice, word, last), piece in zip(keys, pieces, strict=True)}
        cls.file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(of, cls.file)
        print(f"codec: {len(points)} frames of {len(keys)} words have codes", flush=True)
        return cls(of)

    @classmethod
    def load(cls) -> "Codes":
        """Reads `file`, which it writes first if needed."""
        return cls(torch.load(cls.file, weights_only=True)) if cls.file.exists() else cls.make()


def _batch(draw: random.Random, codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (BATCH, 16, FRAMES) and samples (BATCH, FRAMES * FRAME_SAMPLES) of words in any order."""
    pairs = []
    for _ in range(BATCH):
        voice = draw.choice(list(VOICES))
        chosen: list[torch.Tensor] = []
        sound: list[np.ndarray] = []
        while sum(map(len, chosen)) < FRAMES:
            word, last = draw.choice(vocabulary())
            last = last and draw.random() < 0.4
            chosen.append(codes.word(voice, word, last))
            sound.append(unit(voice, word, last))
        pairs.append((torch.cat(chosen)[:FRAMES].T, torch.from_numpy(np.concatenate(sound)[: FRAMES * FRAME_SAMPLES])))
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def _distance(output: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of spectra at several resolutions, and of samples."""
    spectra = torch.zeros(())
    for size in _FFTS:
        ours, theirs = spectrum(output, size), spectrum(wanted, size)
        ours, theirs = ours / size**0.5, theirs / size**0.5
        logarithm = ((ours + 3e-3).log() - (theirs + 3e-3).log()).abs().mean()
        spectra = spectra + logarithm + (ours - theirs).abs().mean() / theirs.mean()
    return spectra / len(_FFTS), (output - wanted).abs().mean() / wanted.abs().mean()


def train() -> None:
    """Trains code2wav: `STEPS` steps, resumable."""
    codes = Codes.load()
    torch.manual_seed(0)
    model: Any = build("code2wav")
    with torch.no_grad():
        model.code_embedding.weight.normal_(std=2.0)  # their mean of 16 is the input
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "decoder", "upsample"))

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"codec {step}")
        said, wanted = _batch(draw, codes)
        wrong = torch.rand(BATCH, 1, FRAMES) < _WRONG
        wrong = wrong & (torch.arange(SIZES.code_groups)[:, None] >= _FINE)
        said = torch.where(wrong, torch.randint(SIZES.codebook, said.shape), said)
        output = model(said).squeeze(1)  # the reference leaves the last few samples out
        spectra, samples = _distance(output, wanted[:, : output.shape[1]])
        return spectra + 0.5 * samples, {"spectra": spectra.item(), "samples": samples.item()}

    loop.run("code2wav", model, optimizers, STEPS, step_loss)


def load() -> nn.Module:
    return loop.load("code2wav", build("code2wav"))


def say_to_file(model: Any, codes: torch.Tensor, file: Path) -> None:
    """Decodes `codes` (frames, 16) to a WAV file."""
    import soundfile

    with torch.inference_mode():
        soundfile.write(file, model(codes.T[None]).flatten().numpy(), RATE_HZ)
