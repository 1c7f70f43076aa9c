"""The small aligner for the engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from services.aligner.family import Sound, WordTimes
from services.aligner.words import split_words
from services.common.engine.weights import SINGLE_FILE
from services.families.ctc_aligner.net import FRAME_MS, LetterNet, classes_of
from services.families.ctc_aligner.viterbi import Scores, place
from services.registry import read_config

MAX_AUDIO_S = 120.0  # the path of a longer sound takes seconds of a core


class LetterAligner:
    """See `services.aligner.family.WordAligner`."""

    dtype = torch.float32
    resolution_ms = FRAME_MS
    max_audio_s = MAX_AUDIO_S

    def __init__(self, net: LetterNet, device: torch.device, languages: Sequence[str]) -> None:
        self._net, self.device, self.languages = net.to(device).eval(), device, languages

    def split(self, text: str, language: str) -> list[str]:
        return split_words(text)

    def align(self, sounds: Sequence[Sound]) -> list[list[WordTimes]]:
        lengths = torch.tensor([len(sound.samples) for sound in sounds])
        rows = [torch.tensor(sound.samples) for sound in sounds]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        heard = [each.cpu().numpy() for each in self._net(padded, lengths.to(self.device))]
        frames = [int(each) for each in self._net.frames_of(lengths)]
        return [
            _times(Scores(*(each[row, : frames[row]] for each in heard)), sound) for row, sound in enumerate(sounds)
        ]


def _times(scores: Scores, sound: Sound) -> list[WordTimes]:
    found = place(scores, [classes_of(word) for word in sound.words])
    return [WordTimes(round(begin * FRAME_MS), round(end * FRAME_MS)) for begin, end in found]


def load_aligner(folder: Path, device: torch.device, dtype: str) -> LetterAligner:
    """Raises ValueError: the weights are not those of config.json, or `dtype` is another than float32."""
    if dtype not in ("auto", "float32"):
        raise ValueError(f"--dtype {dtype}: this model computes in float32")
    config = read_config(folder)
    net = LetterNet(config["width"], list(config["dilations"]))
    try:
        net.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / SINGLE_FILE).items()})
    except RuntimeError as error:
        raise ValueError(f"{folder / SINGLE_FILE}: {error}") from None
    return LetterAligner(net, device, config.get("languages", ()))
