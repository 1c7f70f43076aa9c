"""What code2wav asks of a model family: a module `code2wav` (see `services.families`) with the functions of
`DecoderFamily`."""

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
"""The streams of one step, from `DecoderStates.batch`."""

StepFunction = Callable[[torch.Tensor, Batch], list[torch.Tensor]]
"""See `Decoder.step`."""


@dataclass(frozen=True)
class DecoderSpec:
    """The codec of a checkpoint.

    Attributes:
        codebook_sizes: number of values of each code of a frame.
        trimmed_samples: samples missing at the start of the sound.
        lookahead_frames: frames that must follow a frame before its samples are final. 0: every step gives all its
            samples, and `Decoder.flush` is never called.
        granularity_frames: a step decodes a multiple of it, except at a stream's end.
        voices: the default first; empty: the codes determine the voice.
        windows: cuts of an utterance, which fix the size of each step.
        max_frames: most frames of a stream; 0: no limit.
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
        return len(self.codebook_sizes)

    @property
    def decodes_whole(self) -> bool:
        return self.windows is not None and not self.windows.sizes

    def decodable(self, frames: int, complete: bool, taken: int = 0) -> int:
        """How many of a stream's next `frames` frames a step may decode, after `taken` frames. `complete`: no more
        follow."""
        if self.windows is not None:
            return self.windows.decodable(frames, complete, taken)
        return frames if complete else frames - frames % self.granularity_frames


class DecoderStates(ABC):
    """State of up to `slots` streams between steps. For one thread."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self, voice: str = "", seed: int = 0) -> int | None:
        """Opens the lowest free slot; None if there is none."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self.open(slot, voice, seed)
        return slot

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    @property
    @abstractmethod
    def slot_bytes(self) -> int: ...

    @abstractmethod
    def open(self, slot: int, voice: str, seed: int) -> None:
        """Resets `slot` to the start of a stream with a `voice` of the spec ("": it has none) and the `seed` of the
        decoder's noise."""

    @abstractmethod
    def batch(self, slots: Sequence[int]) -> Batch:
        """The streams in `slots`, all different, in order."""


class Decoder(nn.Module, ABC):
    """Turns frames of several streams into samples. A sample does not depend on the batch.

    Attributes:
        frames_computed: of all streams so far.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.frames_computed = 0

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def prepare(self, folder: Path, settings: WindowSettings) -> None:
        """Takes window settings and reads files in `folder`, before parameters are loaded. May replace `spec`.

        Raises ValueError: the settings do not fit the decoder, or a file is invalid.
        """
        if settings != WindowSettings():
            raise ValueError(
                "--decoding and --window-frames: this checkpoint's decoder needs no frames ahead; leave them out"
            )

    def cast(self, dtype: torch.dtype) -> None:
        """Converts the parameters, except those with a dtype of their own."""
        self.to(dtype=dtype)

    def precompute(self) -> None:
        """Called once the parameters are loaded and on their device."""

    @abstractmethod
    def new_states(self, slots: int) -> DecoderStates: ...

    @abstractmethod
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """Decodes the next frames of each stream of `batch` and advances its state.

        Args:
            codes: (streams, frames, groups), an integer dtype, on `device`, within the codebooks.

        Returns:
            Each stream's next samples, (n,), a floating dtype, on the CPU, -1 to 1; n may be 0.
        """

    def flush(self, batch: Batch) -> list[torch.Tensor]:
        """The last samples of complete streams, as `step` returns them. Only called with look-ahead."""
        raise NotImplementedError

    def captured_step(self, capturer: Capturer, states: DecoderStates, max_frames: int) -> StepFunction:
        """`step` as captured graphs, for up to `max_frames` frames a stream, or uncaptured. No stream may be open."""
        return self.step


class DecoderFamily(Protocol):
    """The module `code2wav` of a family.

    Optional constants: `FOLDER`, the decoder's subfolder with its config.json; `DTYPES`, its default
    dtypes by type of device, "cpu" and "cuda".
    """

    def parameter_of(self, tensor: str) -> str | None:
        """The decoder's parameter for a `tensor` of the checkpoint; None: another part's."""
        ...

    def new_decoder(self, config: dict[str, Any]) -> Decoder:
        """The decoder of a config.json (from `FOLDER`, if there is one), without parameters.

        Raises ValueError: the checkpoint has no decoder, or an unsupported one.
        """
        ...


def default_dtype(family: Any, device_type: str) -> torch.dtype | None:
    """What `--dtype=auto` is for a family's module `code2wav`; None: what the checkpoint states."""
    dtypes: dict[str, torch.dtype] = getattr(family, "DTYPES", {})
    return dtypes.get(device_type)


def load_decoder(
    model: str, dtype: str = "auto", device: str = "auto", windows: WindowSettings | None = None
) -> Decoder:
    """The decoder of the directory or hub id `model`. `dtype` "auto" is the family's, else the checkpoint's.

    Raises:
        ValueError: no such device, checkpoint or decoder, unfit windows, or missing, unknown or misshaped tensors.
    """
    on = prepared_device(device)
    checkpoint = Checkpoint(model)
    config = read_config(checkpoint.folder)
    family: DecoderFamily = family_of(config).part("code2wav", config)  # pyright: ignore[reportAssignmentType]
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
        decoder.cast(default_dtype(family, on.type) or compute_dtype(config, stored))
    else:
        decoder.cast(getattr(torch, dtype))
    decoder.to(device=on)
    if any(parameter.dtype == torch.float32 for parameter in decoder.parameters()):
        torch.backends.cudnn.allow_tf32 = False  # on by default, and 1e-3 off
    decoder.requires_grad_(False).eval()
    decoder.precompute()
    return decoder
