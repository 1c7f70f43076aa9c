"""What windows do to the sound: mel frames of Qwen2.5-Omni's token2wav made by windows, against those of the utterance
made whole, for several windows.

    python -m benchmarks.windows
    python -m benchmarks.windows --layers 3 --hidden 72
    python -m benchmarks.windows --dtype bfloat16 float16

With `--dtype` the cut stays and the dtype of the transformer's layers changes: mel frames and sound are compared with
those of float32, on the same codes, noise and voice. So is what the cut itself changes.

The model has as many layers as the published one at a smaller width, with weights that are random, or random and
sharpened: queries and keys three times as large, so that attention is near to a choice, and its outputs four times, so
that what a frame attends to weighs more in it than the frame itself. Influence of far frames, which windows cut off,
then decays slower than with trained or plainly random weights.
"""

import argparse
import math
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from services.code2wav.family import load_decoder
from services.code2wav.windows import Windows
from services.families.qwen2_5_omni.code2wav import WINDOWS, Token2Wav, new_decoder
from services.families.qwen2_5_omni.tiny.token2wav import LOG_MEL_MEAN, random_weights
from services.families.qwen2_5_omni.token2wav.flow import MelWindow
from services.families.qwen2_5_omni.voices import VoicePreset

SHARP = {"to_q.": 3.0, "to_k.": 3.0, "to_out.": 4.0}
CODES = 1000
UTTERANCES = 3
DECIBELS = 20 / math.log(10)  # of a natural logarithm of an amplitude, which mel frames have
console = Console(width=None if sys.stdout.isatty() else 120)


def random_decoder(layers: int, hidden: int, sharp: bool, dtype: torch.dtype = torch.float32) -> Token2Wav:
    """A model with a small vocoder and a voice."""
    part: dict[str, Any] = {
        "dit_config": {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "head_dim": hidden // 4,
            "num_embeds": CODES - 1,
            "look_ahead_layers": [10 * layers // 22],
            "look_backward_layers": [0, 20 * layers // 22],
        },
        "bigvgan_config": {"upsample_initial_channel": 64},
    }
    decoder = new_decoder({"token2wav_config": part})
    decoder.use({"any": VoicePreset(0, torch.randn(192), torch.randn(30, 80))}, WINDOWS)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() < 2:
            parameter.data.normal_(std=0.2)
        else:
            gain = next((gain for key, gain in SHARP.items() if key in name), 1.0) if sharp else 1.0
            scale = 1.0 if "codec_embed" in name else parameter[0].numel() ** -0.5
            parameter.data.normal_(std=gain * scale)
    decoder.cast(dtype)
    decoder.requires_grad_(False).eval().precompute()
    return decoder


def make_speechlike(decoder: Token2Wav) -> None:
    """Moves mel frames to the level of speech, and gives the vocoder weights that keep its signal's size."""
    decoder.dit.proj_out.bias.fill_(LOG_MEL_MEAN)
    torch.manual_seed(1)
    for name, parameter in decoder.vocoder.named_parameters():
        parameter.copy_(random_weights(f".{name}", parameter.shape))
    decoder.vocoder.conv_post.weight.mul_(0.01)  # so that nothing clips
    decoder.vocoder.precompute()


def mel_by(
    windows: Windows, decoder: Token2Wav, codes: torch.Tensor, noise: torch.Tensor, voice: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """All mel frames, (frames, bins), and how many codes were decoded for them, context included. `voice`: see
    `Dit.voice_rows`."""
    total, start = len(codes), 0
    cuts: list[tuple[int, int, int, int]] = []
    while start < total:
        end = start + windows.size_at(start) if windows.sizes else total
        end, stop = (total, total) if end + windows.future > total else (end, end + windows.future)
        cuts.append((max(0, start - windows.past), start, end, stop))
        start = end
    mels = decoder.flow.mel([MelWindow(codes[a:d], noise[2 * a : 2 * d], voice) for a, _, _, d in cuts])
    kept = [
        mel[2 * (start - first) : 2 * (end - first)] for mel, (first, start, end, _) in zip(mels, cuts, strict=True)
    ]
    return torch.cat(kept), sum(stop - first for first, _, _, stop in cuts)


@torch.inference_mode()
def rows_of(decoder: Token2Wav, settings: list[Windows], frames: int) -> list[list[str]]:
    """A row of the table for each of `settings`."""
    codes, noise = torch.randint(CODES, (frames,)), torch.randn(2 * frames, 80)
    voice = decoder.dit.voice_rows(torch.randn(192), torch.randn(30, 80))
    whole, _ = mel_by(Windows(()), decoder, codes, noise, voice)
    rows: list[list[str]] = []
    for windows in settings:
        mel, decoded = mel_by(windows, decoder, codes, noise, voice)
        error = mel - whole
        snr_db = 10 * torch.log10(whole.var() / error.square().mean())
        edges = ", ".join(map(str, windows.sizes))
        figures = [f"{error.abs().max():.1e}", f"{snr_db:.0f}", f"{decoded / frames:.1f}"]
        rows.append([edges, str(windows.past), str(windows.future), *figures])
        console.print(" | ".join(rows[-1]))
    return rows


def snr_db(reference: torch.Tensor, other: torch.Tensor) -> float:
    return float(10 * torch.log10(reference.var() / (other - reference).square().mean()))


@torch.inference_mode()
def decoded(
    options: argparse.Namespace, weights: str, dtype: torch.dtype, windows: Windows
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mel frames, (frames, bins), and sound, (samples,), of some utterances. Their codes, noise and voices, and the
    weights, are always the same."""
    torch.manual_seed(0)
    if options.model:
        loaded = load_decoder(options.model, str(dtype).removeprefix("torch."), "cpu")
        assert isinstance(loaded, Token2Wav), "the checkpoint is of another family"
        decoder = loaded
    else:
        decoder = random_decoder(options.layers, options.hidden, weights == "sharpened", dtype)
        make_speechlike(decoder)
    known = list(decoder.voices.values())
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(UTTERANCES):
        torch.manual_seed(seed)
        voice = known[seed % len(known)] if options.model else VoicePreset(0, torch.randn(192), torch.randn(30, 80))
        codes, noise = torch.randint(CODES, (options.frames,)), torch.randn(2 * options.frames, 80)
        rows = decoder.dit.voice_rows(voice.conditioning, voice.reference_mel)
        mel, _ = mel_by(windows, decoder, codes, noise, rows)
        (sound,) = decoder.vocoder.sound([(decoder.vocoder.new_state(), mel, True)])
        made.append((mel, sound))
    return made


def measure_dtypes(options: argparse.Namespace) -> None:
    model = options.model or f"{options.layers} layers of {options.hidden}"
    table = Table(title=f"{model}, the worst of {UTTERANCES} utterances of {options.frames} codes, against float32")
    for heading in ("weights", "", "mel SNR dB", "mel distance dB, rms", "most", "sound SNR dB"):
        table.add_column(heading, justify="right")
    cases = [(f"{name} layers", getattr(torch, name), WINDOWS) for name in options.dtype]
    for weights in ("trained",) if options.model else ("random", "sharpened"):
        reference = decoded(options, weights, torch.float32, WINDOWS)
        for name, dtype, windows in [*cases, ("no windows", torch.float32, Windows(()))]:
            pairs = list(zip(reference, decoded(options, weights, dtype, windows), strict=True))
            distances = [DECIBELS * (other - mel) for (mel, _), (other, _) in pairs]
            figures = [
                f"{min(snr_db(mel, other) for (mel, _), (other, _) in pairs):.0f}",
                f"{max(float(distance.square().mean().sqrt()) for distance in distances):.2f}",
                f"{max(float(distance.abs().max()) for distance in distances):.2f}",
                f"{min(snr_db(sound, other) for (_, sound), (_, other) in pairs):.0f}",
            ]
            console.print(" | ".join([weights, name, *figures]))
            table.add_row(weights, name, *figures)
    console.print(table)


def measure_windows(options: argparse.Namespace) -> None:
    contexts = [(0, 0), (12, 12), (24, 12), (48, 12), (24, 24), (48, 24), (48, 36)]
    settings = [Windows(WINDOWS.sizes, past, future) for past, future in contexts]
    settings.append(Windows((36,), 24, 12))  # the chunks of the model's makers
    for name in ("random", "sharpened"):
        torch.manual_seed(0)
        table = Table(title=f"{name} weights, {options.layers} layers of {options.hidden}, {options.frames} codes")
        for title in ("windows", "past", "future", "most mel error", "SNR dB", "codes decoded\nper code"):
            table.add_column(title, justify="right")
        for row in rows_of(
            random_decoder(options.layers, options.hidden, name == "sharpened"), settings, options.frames
        ):
            table.add_row(*row)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--frames", type=int, default=204, help="codes of the utterance, 50 a second")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16"), help="of the transformer's layers")
    parser.add_argument("--model", help="a checkpoint's directory or hub id, to change its dtype")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.dtype:
        measure_dtypes(options)
    else:
        measure_windows(options)


if __name__ == "__main__":
    main()
