"""What windows do to the sound: mel frames of Qwen2.5-Omni's token2wav made by windows, against those of the utterance
made whole, for several windows.

    python -m benchmarks.windows
    python -m benchmarks.windows --layers 3 --hidden 72

The model has as many layers as the published one at a smaller width, with weights that are random, or random and
sharpened: queries and keys three times as large, so that attention is near to a choice, and its outputs four times, so
that what a frame attends to weighs more in it than the frame itself. Influence of far frames, which windows cut off,
then decays slower than with trained or plainly random weights.
"""

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from services.code2wav.windows import Windows
from services.families.qwen2_5_omni.code2wav import WINDOWS, Token2Wav, new_decoder
from services.families.qwen2_5_omni.token2wav.flow import MelWindow
from services.families.qwen2_5_omni.voices import VoicePreset

SHARP = {"to_q.": 3.0, "to_k.": 3.0, "to_out.": 4.0}
CODES = 1000
console = Console(width=None if sys.stdout.isatty() else 120)


def random_decoder(layers: int, hidden: int, sharp: bool) -> Token2Wav:
    """A model with a small vocoder, which is not used, and a voice."""
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
    decoder.requires_grad_(False).eval().precompute()
    return decoder


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--frames", type=int, default=204, help="codes of the utterance, 50 a second")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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


if __name__ == "__main__":
    main()
