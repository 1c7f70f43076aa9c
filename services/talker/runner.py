"""The device side of the engine: key-value slots, prefill, and one frame for every row of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.talker.model import TalkerModel
from services.talker.prompt import PromptRows
from services.talker.sampling import Sampling, SamplingRows, draw, penalize, uniform

_LENGTH_STEP = 64  # attention looks at a multiple of this many cached positions: few shapes, little waste


@dataclass(frozen=True)
class TextInput:
    """What one slot's next talker step reads beside its last frame."""

    slot: int
    text_id: int
    length: int  # cached positions, which is where the step writes
    rope_position: int


@dataclass(frozen=True)
class FrameInput:
    """A slot whose state is ready for a frame."""

    slot: int
    frame: int  # index of the frame
    width: int  # codes that group 0 keeps; 0 if greedy
    predictor_width: int


class TalkerRunner:
    """A model and `slots` rows of state. Used by one thread at a time; knows nothing of requests.

    A batch is the range of slots from the lowest to the highest that takes part. Rows in between that do not take
    part are computed too, so that every view of the cache is a slice and nothing is gathered; what they compute is
    thrown away, and what they write goes to a spare position at the end of their slot.
    """

    def __init__(self, model: TalkerModel, slots: int, positions: int) -> None:
        sizes, device = model.spec.talker, model.device
        self.model, self.slots, self.positions = model, slots, positions
        # Zeros, not empty: attention weighs masked positions with 0, and 0 times a stray NaN would be NaN.
        shape = (sizes.layers, slots, sizes.kv_heads, positions + 1, sizes.head_dim)
        self._keys = torch.zeros(shape, dtype=model.dtype, device=device)
        self._values = torch.zeros(shape, dtype=model.dtype, device=device)
        self._hidden = torch.zeros(slots, sizes.hidden, dtype=model.dtype, device=device)
        self._frame_row = torch.zeros(slots, sizes.hidden, dtype=model.dtype, device=device)
        self._seen = torch.zeros(slots, sizes.vocab, dtype=torch.bool, device=device)
        self._penalty = torch.ones(slots, device=device)
        self._seed = torch.zeros(slots, dtype=torch.long, device=device)
        self._rules = SamplingRows.empty(slots, device)
        self._predictor_rules = SamplingRows.empty(slots, device)
        self._suppressed = torch.tensor(model.spec.suppressed_codes, device=device)

    def assign(self, slot: int, sampling: Sampling) -> None:
        """Gives `slot` to a new request."""
        self._seen[slot] = False
        self._penalty[slot] = sampling.repetition_penalty
        self._seed[slot] = sampling.seed
        self._rules.set(slot, sampling.temperature, sampling.top_k, sampling.top_p)
        self._predictor_rules.set(
            slot, sampling.predictor_temperature, sampling.predictor_top_k, sampling.predictor_top_p
        )

    @torch.inference_mode()
    def prefill(self, slot: int, rows: PromptRows, begin: int, end: int) -> None:
        """Runs rows `begin` to `end` of a prompt whose rows before `begin` were run already."""
        device = self.model.device
        places = torch.arange(begin, end, device=device)
        length = self._visible(end)
        mask = torch.arange(length, device=device) <= places[:, None]
        hidden = self.model.model(
            rows.embeddings[None, begin:end],
            rows.positions[None, begin:end].to(device),
            self._keys[:, slot : slot + 1, :, :length],
            self._values[:, slot : slot + 1, :, :length],
            places[None],
            mask[None, None],
        )
        self._hidden[slot] = hidden[0, -1]

    @torch.inference_mode()
    def advance(self, batch: list[TextInput]) -> None:
        """One talker step for the slots in `batch`: last frame and text in, next state out."""
        rows = _span(batch)
        host = torch.zeros(4, rows.stop - rows.start, dtype=torch.long)
        host[2] = self.positions  # the spare position: where rows that sit out write
        for row in batch:
            host[:, row.slot - rows.start] = torch.tensor((1, row.text_id, row.length, row.rope_position))
        active, text_ids, places, rope = host.to(self.model.device, non_blocking=True)
        length = self._visible(max(row.length for row in batch) + 1)
        mask = torch.arange(length, device=self.model.device) <= places[:, None]
        hidden = self.model.model(
            (self._frame_row[rows] + self.model.text_table[text_ids])[:, None],
            rope[:, None, None].expand(-1, -1, 3),
            self._keys[:, rows],
            self._values[:, rows],
            places[:, None],
            mask[:, None, None],
        )
        self._hidden[rows] = torch.where(active.bool()[:, None], hidden[:, 0], self._hidden[rows])

    @torch.inference_mode()
    def frames(self, batch: list[FrameInput]) -> torch.Tensor:
        """Draws a frame for each slot in `batch` from its state.

        Returns:
            (batch, groups) int32 on the CPU, in the order of `batch`. Where group 0 is the codec's end-of-speech there
            is no frame, and the rest of the row means nothing.
        """
        model, rows = self.model, _span(batch)
        host = torch.zeros(2, rows.stop - rows.start, dtype=torch.long)
        for row in batch:
            host[:, row.slot - rows.start] = torch.tensor((1, row.frame))
        active, frames = host.to(model.device, non_blocking=True)
        active = active.bool().unsqueeze(-1)
        width, predictor_width = max(row.width for row in batch), max(row.predictor_width for row in batch)
        noise = uniform(self._seed[rows], frames, model.spec.num_code_groups) if width or predictor_width else None

        hidden, rules, predictor_rules = self._hidden[rows], self._rules[rows], self._predictor_rules[rows]
        logits = penalize(model.codec_head(hidden).float(), self._seen[rows], self._penalty[rows])
        logits[:, self._suppressed] = -torch.inf
        first = draw(logits, rules, None if noise is None else noise[:, 0], width)
        self._seen[rows] |= active & (torch.arange(logits.shape[-1], device=model.device) == first.unsqueeze(-1))

        def draw_code(logits: torch.Tensor, group: int) -> torch.Tensor:
            return draw(logits, predictor_rules, None if noise is None else noise[:, group], predictor_width)

        codes, frame_row = model.code_predictor(hidden, first, model.model.codec_embedding(first), draw_code)
        self._frame_row[rows] = torch.where(active, frame_row, self._frame_row[rows])
        return codes.to("cpu", torch.int32)[[row.slot - rows.start for row in batch]]

    def _visible(self, length: int) -> int:
        """`length` rounded up."""
        return min(self.positions, -(-length // _LENGTH_STEP) * _LENGTH_STEP)


def _span(batch: Sequence[TextInput | FrameInput]) -> slice:
    """From the lowest slot of `batch` to its highest."""
    slots = [row.slot for row in batch]
    return slice(min(slots), max(slots) + 1)
