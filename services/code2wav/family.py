"""What code2wav asks of a model family: a decoder of codec frames, and what the engine must know of it.

A family that has one has a module `code2wav` (see `services.families`) with the functions of `DecoderFamily`.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from services.code2wav.windows import Windows, WindowSettings
from services.common.engine.device import Capturer, prepared_device
from services.common.engine.weights import Checkpoint, compute_dtype
from services.registry import family_of, read_config

Batch = Any
"""What `States.batch` returns: the streams of one step, for the decoder that made the states."""

Step = Callable[[torch.Tensor, Batch], list[torch.Tensor]]
"""As `Decoder.step`."""


@dataclass(frozen=True)
class DecoderSpec:
    """The codec of one checkpoint.

    Attributes:
        sample_rate_hz: of the sound.
        samples_per_frame: samples that a codec frame stands for.
        codebook_sizes: for each code of a frame, the number of its values.
        trimmed_samples: samples that the sound is shorter than all frames x samples_per_frame.
        lookahead_frames: frames that must follow a frame before its samples are given out; the last ones of a stream
            come with `Decoder.flush`. 0: every step gives out all it decodes, and nothing is left to flush.
        granularity_frames: a step decodes a multiple of it, but for the rest of a complete stream.
        voices: names that a stream can be opened with, the default first; empty: the codes alone say how it sounds.
        windows: how an utterance is cut, which says how many frames each step takes; None: it is not cut.
        max_frames: most frames of a stream; 0: any number.
    """

    sample_rate_hz: int
    samples_per_frame: int
    codebook_sizes: tuple[int, ...]
    trimmed_samples: int = 0
    lookahead_frames: int = 0
    granularity_frames: int = 1
    voices: tuple[str, ...] = ()
    windows: Windows | None = None
    max_frames: int = 0

    @property
    def num_code_groups(self) -> int:
        """Codes of a frame."""
        return len(self.codebook_sizes)

    @property
    def decodes_whole(self) -> bool:
        """Whether all frames must be there before there is any sound."""
        return self.windows is not None and not self.windows.sizes

    @property
    def frames_per_second(self) -> float:
        """Codec frames that a second of sound has."""
        return self.sample_rate_hz / self.samples_per_frame

    def decodable(self, frames: int, complete: bool, taken: int = 0) -> int:
        """How many of a stream's next `frames` frames a step may decode. `complete`: no more will follow them. `taken`:
        frames of the steps before."""
        if self.windows is not None:
            return self.windows.decodable(frames, complete, taken)
        return frames if complete else frames - frames % self.granularity_frames


class States(ABC):
    """What a decoder carries of each stream from step to step. Used by one thread; its size is fixed when it is made.

    Args:
        slots: streams that can be open at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        """Slots that can be acquired."""
        return len(self._free)

    def acquire(self, voice: str = "", seed: int = 0) -> int | None:
        """The lowest free slot, in the state of a stream's start, or None if all are taken."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self.open(slot, voice, seed)
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        heapq.heappush(self._free, slot)

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Memory of one slot."""

    @abstractmethod
    def open(self, slot: int, voice: str, seed: int) -> None:
        """Puts `slot` in the state of the start of a stream.

        Args:
            voice: one of the spec's voices, "" where it has none.
            seed: of the noise, where the decoder draws any.
        """

    @abstractmethod
    def batch(self, slots: Sequence[int]) -> Batch:
        """The streams in `slots` (all different), in that order."""


class Decoder(nn.Module, ABC):
    """Frames of several streams to samples, a few frames at a time. Which streams share a step changes no sample."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.frames_computed = 0
        """Frames of all streams that were computed so far."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        return next(self.parameters()).dtype

    def prepare(self, folder: Path, settings: WindowSettings) -> None:
        """Called before parameters are loaded: takes the settings of windows, and what else it needs of the
        checkpoint's `folder`. May replace `spec`.

        Raises:
            ValueError: it cannot be decoded like that, or what lies in the folder is at fault.
        """
        if settings != WindowSettings():
            raise ValueError(
                "--decoding and --window-*: this checkpoint's decoder needs no frames ahead; leave them out"
            )

    def cast(self, dtype: torch.dtype) -> None:
        """Makes `dtype` that of the parameters, but for those that the decoder keeps in another."""
        self.to(dtype=dtype)

    def precompute(self) -> None:
        """Called once the parameters are loaded and at their place."""

    @abstractmethod
    def new_states(self, slots: int) -> States:
        """States of `slots` streams, on this decoder's device."""

    @abstractmethod
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """Decodes the next frames of each stream of `batch` and advances its state.

        Args:
            codes: (streams, frames, groups), an integer dtype, on `device`, of values that the codebooks have.

        Returns:
            For each stream its next samples, (n,), a floating dtype, on the CPU, -1 to 1; n may be 0.
        """

    def flush(self, batch: Batch) -> list[torch.Tensor]:
        """The samples of complete streams that look-ahead has held back, as `step` returns them.

        Called once a stream, after its last step, of a decoder whose spec has look-ahead.
        """
        raise NotImplementedError

    def captured_step(self, capturer: Capturer, states: States, max_frames: int) -> Step:
        """`step` on `states` as captured graphs, for up to `max_frames` frames a stream. No stream may be open.

        A decoder that cannot be captured returns its `step`.
        """
        return self.step


class DecoderFamily(Protocol):
    """The module `code2wav` of a family.

    A family whose decoder lies in a folder of the checkpoint, with a config.json of its own, names it: `FOLDER`. One
    whose decoder does not compute in the checkpoint's dtype where none is asked for names the one it does: `DTYPE`.
    """

    def parameter_of(self, tensor: str) -> str | None:
        """Name of the decoder's parameter that the checkpoint's `tensor` holds; None: it is not the decoder's."""
        ...

    def new_decoder(self, config: dict[str, Any]) -> Decoder:
        """The decoder that `config` (config.json; that of `FOLDER`, if there is one) describes, with no parameters
        loaded yet.

        Raises:
            ValueError: the checkpoint has no decoder, or one of a kind that does not run here.
        """
        ...


def load_decoder(
    model: str, dtype: str = "auto", device: str = "auto", windows: WindowSettings | None = None
) -> Decoder:
    """The decoder of a checkpoint.

    Args:
        model: directory or hub id.
        dtype: name of a torch dtype, or "auto" for the family's, which is the checkpoint's where the family has none.
        device: a torch device, or "auto" for cuda if there is one, else cpu.
        windows: how utterances are cut; None: as the decoder does by itself.

    Raises:
        ValueError: no such device, no such checkpoint, no decoder in it, windows that it does not take, or tensors that
            are missing, unknown or of another shape.
    """
    on = prepared_device(device)
    checkpoint = Checkpoint(model)
    config = read_config(checkpoint.folder)
    family: DecoderFamily = family_of(config).part("code2wav")  # pyright: ignore[reportAssignmentType]
    subfolder: str = getattr(family, "FOLDER", "")
    if subfolder:
        config = read_config(checkpoint.folder / subfolder)
    decoder = family.new_decoder(config)
    decoder.prepare(checkpoint.folder, windows or WindowSettings())
    checkpoint.select(lambda name: family.parameter_of(name) is not None, subfolder)
    tensors = {parameter: tensor for name, tensor in checkpoint.tensors() if (parameter := family.parameter_of(name))}
    try:
        decoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{model}: {error}") from None
    if dtype == "auto":
        stored = next(iter(tensors.values())).dtype
        decoder.cast(getattr(family, "DTYPE", None) or compute_dtype(config, stored))
    else:
        decoder.cast(getattr(torch, dtype))
    decoder.to(device=on)
    if any(parameter.dtype == torch.float32 for parameter in decoder.parameters()):
        torch.backends.cudnn.allow_tf32 = False  # on by default, and 1e-3 off
    decoder.requires_grad_(False).eval()
    decoder.precompute()
    return decoder
