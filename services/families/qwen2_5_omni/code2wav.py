"""Qwen2.5-Omni's token2wav: windows of codes to mel frames, as the reference's, and mel frames to sound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.code2wav.family import Decoder, DecoderSpec, DecoderStates, StepFunction
from services.code2wav.windows import Windows, WindowSettings
from services.common.engine.device import Capturer
from services.common.engine.ecapa import SpeakerEncoder
from services.families.qwen2_5_omni.token2wav.bigvgan import BigVgan, BigVganSizes, Part, VocoderState
from services.families.qwen2_5_omni.token2wav.dit import Dit
from services.families.qwen2_5_omni.token2wav.flow import Flow, MelWindow, evaluation_times
from services.families.qwen2_5_omni.token2wav.pieces import PiecedVocoder
from services.families.qwen2_5_omni.token2wav.sizes import SPEAKER_DEFAULTS, DitSizes
from services.families.qwen2_5_omni.voices import FILE, VoicePreset, read_voices

# By type of device, for any dtype of the checkpoint. float32 is the reference's; docs/gpus.md has what bfloat16 loses.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
MEL_FRAMES_PER_SECOND = 100
# `benchmarks/windows.py` measures the sound of other sizes. The first window must be longer than BigVGAN's delay. The
# second one is small, so that the third is there in time.
WINDOWS = Windows(sizes=(24, 12, 24, 48, 96), past=24, future=12)
_PARTS = {"token2wav.code2wav_dit_model.": "dit.", "token2wav.code2wav_bigvgan_model.": "vocoder."}
_COMPUTED = (".filter", ".inv_freq")  # stored by some versions of the reference


def parameter_of(tensor: str) -> str | None:
    for prefix, name in _PARTS.items():
        if tensor.startswith(prefix) and not tensor.endswith(_COMPUTED):
            return name + tensor.removeprefix(prefix)
    return None


def new_decoder(config: dict[str, Any]) -> "Token2Wav":
    part: dict[str, Any] = config["token2wav_config"]
    name = "token2wav_config.dit_config"
    stated: dict[str, Any] = part.get("dit_config") or {}
    speaker = SpeakerEncoder({**SPEAKER_DEFAULTS, **stated}, name)
    vocoder = BigVganSizes.of(part.get("bigvgan_config") or {}, "token2wav_config.bigvgan_config")
    return Token2Wav(DitSizes.of(stated, name), speaker, vocoder)


@dataclass
class Token2WavStream:
    """A stream.

    Attributes:
        codes: (n,) int64, on the decoder's device, from frame `first`.
        noise: (n x repeats, bins) float32, on the CPU, likewise.
        start: first frame of the next window.
    """

    voice: str
    generator: torch.Generator
    sound: VocoderState
    codes: torch.Tensor
    noise: torch.Tensor
    first: int = 0
    start: int = 0

    @property
    def taken(self) -> int:
        """Frames so far."""
        return self.first + len(self.codes)

    def add(self, codes: torch.Tensor, repeats: int) -> None:
        """Appends codes (frames,), and noise for them."""
        noise = torch.randn(len(codes) * repeats, self.noise.shape[1], generator=self.generator)
        self.codes, self.noise = torch.cat([self.codes, codes]), torch.cat([self.noise, noise])

    def forget(self, first: int, repeats: int) -> None:
        """Drops the frames before `first`."""
        if first > self.first:
            self.codes = self.codes[first - self.first :].clone()
            self.noise = self.noise[(first - self.first) * repeats :].clone()
            self.first = first


class Token2WavStates(DecoderStates):
    def __init__(self, slots: int, new: Callable[[str, int], Token2WavStream], slot_bytes: int) -> None:
        super().__init__(slots)
        self._new, self._slot_bytes = new, slot_bytes
        self._speeches: list[Token2WavStream | None] = [None] * slots

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    def open(self, slot: int, voice: str, seed: int) -> None:
        speech = self._speeches[slot] = self._new(voice, seed)
        speech.sound.slot = slot

    def release(self, slot: int) -> None:
        self._speeches[slot] = None
        super().release(slot)

    def batch(self, slots: Sequence[int]) -> list[Token2WavStream]:
        return [speech for slot in slots if (speech := self._speeches[slot]) is not None]


class Token2Wav(Decoder):
    """Raises ValueError if the sizes do not fit each other."""

    def __init__(self, sizes: DitSizes, speaker: SpeakerEncoder, vocoder: BigVganSizes) -> None:
        if sizes.mel_dim != vocoder.mel_dim:
            raise ValueError(f"token2wav_config: mel_dim is {sizes.mel_dim} and, of BigVGAN, {vocoder.mel_dim}")
        if sizes.repeats * sizes.mel_dim % 16:
            # torch draws normal numbers in sixteens. Only multiples give the same noise in one draw as in several.
            name = "token2wav_config.dit_config: repeats x mel_dim"
            raise ValueError(f"{name}, {sizes.repeats} x {sizes.mel_dim}, must be a multiple of 16")
        samples = sizes.repeats * vocoder.samples_per_mel
        super().__init__(
            DecoderSpec(vocoder.samples_per_mel * MEL_FRAMES_PER_SECOND, samples, codebook_sizes=(sizes.codes,))
        )
        self.sizes = sizes
        self._vocoder_lag = -(-vocoder.delay_frames // sizes.repeats)
        self.dit, self.vocoder = Dit(sizes, speaker, evaluation_times()), BigVgan(vocoder)
        self.flow = Flow(self.dit)
        self._sound = self.vocoder.sound
        self.voices: dict[str, VoicePreset] = {}
        self._voice_rows: dict[str, torch.Tensor] = {}

    def prepare(self, folder: Path, settings: WindowSettings) -> None:
        self.use(read_voices(folder), settings.over(self._default_windows()))

    def use(self, voices: dict[str, VoicePreset], windows: Windows) -> None:
        """Sets voices, the default first, and windows. Raises ValueError if they do not fit the model."""
        windows.check(self.sizes.block_codes)
        most = self.sizes.max_position_embeddings // self.sizes.repeats
        if windows.most_decoded > most:
            raise ValueError(
                f"--window-frames: with those around it, a window has {windows.most_decoded} frames, more "
                f"than the {most} that the model was made for"
            )
        for name, voice in voices.items():
            widths = len(voice.conditioning), voice.reference_mel.shape[1]
            if widths != (self.sizes.enc_emb_dim, self.sizes.mel_dim):
                wanted = f"{self.sizes.enc_emb_dim} and {self.sizes.mel_dim}"
                raise ValueError(f"{FILE}: {name}: cond and ref_mel are {widths[0]} and {widths[1]} wide, not {wanted}")
        self.voices = voices
        self.spec = replace(
            self.spec,
            lookahead_frames=windows.future + self._vocoder_lag if windows.sizes else most,
            voices=tuple(voices),
            windows=windows,
            max_frames=0 if windows.sizes else most,
        )

    def _default_windows(self) -> Windows:
        """`WINDOWS`, scaled to the model's blocks."""
        block = self.sizes.block_codes
        scaled = [frames * block // 12 for frames in (*WINDOWS.sizes, WINDOWS.past, WINDOWS.future)]
        return Windows(tuple(scaled[:-2]), scaled[-2], scaled[-1])

    @property
    def dtype(self) -> torch.dtype:
        """That of the transformer's layers; all else is float32."""
        return self.dit.dtype

    def cast(self, dtype: torch.dtype) -> None:
        """Converts the transformer's layers, and all else to float32."""
        self.to(dtype=torch.float32)
        self.dit.cast(dtype)

    @torch.inference_mode()
    def precompute(self) -> None:
        device = self.device
        self.dit.precompute()
        self.flow.precompute(device)
        self.vocoder.precompute()
        self._voice_rows = {
            name: self.dit.voice_rows(voice.conditioning.to(device), voice.reference_mel.to(device))
            for name, voice in self.voices.items()
        }

    def new_states(self, slots: int) -> Token2WavStates:
        windows, device = self.spec.windows or WINDOWS, self.device
        bins = self.sizes.mel_dim
        held = windows.most_decoded or self.spec.max_frames

        def new(voice: str, seed: int) -> Token2WavStream:
            return Token2WavStream(
                voice=voice or self.spec.voices[0],
                generator=torch.Generator().manual_seed(seed),
                sound=self.vocoder.new_state(),
                codes=torch.zeros(0, dtype=torch.int64, device=device),
                noise=torch.zeros(0, bins),
            )

        return Token2WavStates(slots, new, self.vocoder.bytes_per_state + held * (8 + 4 * bins * self.sizes.repeats))

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: list[Token2WavStream]) -> list[torch.Tensor]:
        """Decodes each window whose frames and context are complete."""
        for speech, new in zip(batch, codes, strict=True):
            speech.add(new[:, 0], self.sizes.repeats)
        pieces = [torch.zeros(0)] * len(batch)
        while ready := [i for i, speech in enumerate(batch) if self._is_ready(speech)]:
            samples = self._decode([batch[i] for i in ready], last=False)
            for i, piece in zip(ready, samples, strict=True):
                pieces[i] = torch.cat([pieces[i], piece])
        return pieces

    @torch.inference_mode()
    def flush(self, batch: list[Token2WavStream]) -> list[torch.Tensor]:
        """Decodes the last windows, which take all remaining frames."""
        return self._decode(batch, last=True)

    def captured_step(self, capturer: Capturer, states: DecoderStates, max_frames: int) -> StepFunction:
        windows = self.spec.windows
        if windows is not None and windows.sizes:
            block = self.sizes.block_codes
            self.flow.capture(capturer, -(-windows.most_decoded // block) * min(states.slots, 8))
            self._sound = PiecedVocoder(self.vocoder, capturer, states.slots, self.sizes.block_size).sound
        return self.step

    def _is_ready(self, speech: Token2WavStream) -> bool:
        windows = self.spec.windows
        if windows is None or not windows.sizes:
            return False
        return speech.taken >= speech.start + windows.size_at(speech.start) + windows.future

    def _decode(self, speeches: list[Token2WavStream], last: bool) -> list[torch.Tensor]:
        """The samples of each stream's next window; of the last one, all remaining samples."""
        windows, repeats = self.spec.windows or WINDOWS, self.sizes.repeats
        ends = [s.taken if last else s.start + windows.size_at(s.start) for s in speeches]
        stops = [s.taken if last else end + windows.future for s, end in zip(speeches, ends, strict=True)]
        cut = [self._window(*each) for each in zip(speeches, ends, stops, strict=True)]
        mels = self.flow.mel([window for window in cut if len(window.codes)])
        self.frames_computed += sum(len(window.codes) for window in cut)
        parts: list[Part] = []
        for speech, window, end in zip(speeches, cut, ends, strict=True):
            mel = mels.pop(0) if len(window.codes) else window.noise.to(self.device)
            context = speech.start - speech.first
            parts.append((speech.sound, mel[context * repeats : (end - speech.first) * repeats], last))
            speech.start = end
            speech.forget(max(0, end - windows.past), repeats)
        sounds = self._sound(parts)
        return list(torch.split(torch.cat(sounds).cpu(), [len(samples) for samples in sounds]))

    def _window(self, speech: Token2WavStream, end: int, stop: int) -> MelWindow:
        """The window for frames up to `end`, with context up to `stop`; empty without frames to decode."""
        count = stop - speech.first if end > speech.start else 0
        noise = speech.noise[: count * self.sizes.repeats]
        return MelWindow(speech.codes[:count], noise, self._voice_rows[speech.voice])
