"""The device side of the engine: key-value slots, prefill, and one frame for every row of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.common.engine.device import Capturer
from services.talker.attention import SDPA, CacheAttention, KeyValueCache, PromptChunk
from services.talker.graphs import StepGraphs, StepShape
from services.talker.model import TalkerModel
from services.talker.predictor import CompiledPredictor
from services.talker.sampling import Sampling, SamplingRows, penalize, prepared_width
from services.talker.steps import TORCH, StepKernels

_LENGTH_STEP = 64  # attention looks at a multiple of this many cached positions: few shapes, little waste


@dataclass(frozen=True)
class Advance:
    """The talker step that a slot needs before its frame; it reads the slot's last frame and this text.

    Attributes:
        length: cached positions: the step writes there.
        state: the thinker's (width,) of the text, with the spec's `text_has_states` and while there is text.
    """

    text_id: int
    length: int
    rope_position: int
    state: torch.Tensor | None = None


@dataclass(frozen=True)
class StepInput:
    """A slot that gets a frame. `advance` is None right after its prefill, which has made its state."""

    slot: int
    frame: int  # index of the frame
    width: int  # codes that group 0 keeps; 0 if greedy
    predictor_width: int
    advance: Advance | None


class TalkerRunner:
    """A model and `slots` rows of state. For one thread at a time.

    A step computes the slots from the first to the highest that takes part: views of the cache are slices, nothing is
    gathered. Rows that sit out compute in vain, and write to a spare position at the end of their slot. `move` keeps
    the slots in use low.

    Args:
        positions: longest prompt plus frames of a request.
        capturer: captures every step (`StepGraphs`) in the constructor; None: steps run eagerly.
        compiled: the code predictor is a `CompiledPredictor`. For a CPU, without a capturer.
        kernels: of steps. Prompts run by torch's operators.
        attention: of prompts and steps to the cache.

    Raises:
        RuntimeError: it cannot be compiled.
    """

    @torch.inference_mode()  # as all that uses the state: a program is compiled for tensors of one kind
    def __init__(
        self,
        model: TalkerModel,
        slots: int,
        positions: int,
        capturer: Capturer | None = None,
        compiled: bool = False,
        kernels: StepKernels = TORCH,
        attention: CacheAttention = SDPA,
    ) -> None:
        spec, sizes, device = model.spec, model.spec.talker, model.device
        self.model, self.slots, self.positions = model, slots, positions
        self._kernels, self._attention = kernels, attention
        shape = (sizes.layers, slots, sizes.kv_heads, positions + 1, sizes.head_dim)
        self._cache = KeyValueCache.zeros(shape, model.dtype, device, attention.heads_inside)
        self._hidden = torch.zeros(slots, sizes.hidden, dtype=model.dtype, device=device)
        self._frame_row = torch.zeros(slots, sizes.hidden, dtype=model.dtype, device=device)
        self._seen = torch.zeros(slots, sizes.vocab, dtype=torch.bool, device=device)
        self._penalty = torch.ones(slots, device=device)
        self._seed = torch.zeros(slots, dtype=torch.long, device=device)
        self._rules = SamplingRows(slots, device)
        self._predictor_rules = SamplingRows(slots, device)
        self._suppressed = torch.tensor(sorted(spec.suppressed_codes), dtype=torch.long, device=device)
        self._ends = torch.tensor(sorted(spec.end_codes), dtype=torch.long, device=device)
        self._seen_at_start = torch.tensor(sorted(spec.seen_codes), dtype=torch.long, device=device)
        self._codes = torch.arange(sizes.vocab, device=device)
        self._frame_cache = model.code_predictor.new_cache(slots) if model.code_predictor else None
        # speaks, advances, text id, place, rope position, frame: (6, slots). An idle row writes to the spare position.
        self._idle = (0, 0, 0, positions, 0, 0)
        self._host_inputs = torch.zeros(6, slots, dtype=torch.long, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros(6, slots, dtype=torch.long, device=device)
        self._host_idle = torch.tensor(self._idle)[:, None]
        self._text_states = self._host_text_states = None
        if spec.text_has_states and spec.state_width:
            self._host_text_states = torch.zeros(
                slots, spec.state_width, dtype=model.dtype, pin_memory=device.type == "cuda"
            )
            self._text_states = self._host_text_states.to(device)
        self._compiled = CompiledPredictor(model.code_predictor, slots) if compiled and model.code_predictor else None
        self._graphs: StepGraphs | None = None
        if capturer is not None:
            codes = max(sizes.vocab, spec.predictor.vocab if spec.predictor else 0)
            has_lengths = attention.has_lengths
            self._graphs = StepGraphs(capturer, self._step, self._inputs, self._idle, positions, codes, has_lengths)

    @torch.inference_mode()
    def assign(self, slot: int, sampling: Sampling) -> None:
        """Gives `slot` to a new request."""
        self._seen[slot] = False
        self._seen[slot, self._seen_at_start] = True
        self._penalty[slot].fill_(sampling.repetition_penalty)  # `=` would copy the number, which waits for a GPU
        self._seed[slot].fill_(sampling.seed)
        self._rules.set(slot, sampling.temperature, sampling.top_k, sampling.top_p)
        self._predictor_rules.set(
            slot, sampling.predictor_temperature, sampling.predictor_top_k, sampling.predictor_top_p
        )

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copies the request in slot `source`, with `length` cached positions, to the free slot `target`."""
        for cache in (self._cache.keys, self._cache.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]
        rules = [rule for rows in (self._rules, self._predictor_rules) for rule in vars(rows).values()]
        for state in (self._hidden, self._frame_row, self._seen, self._penalty, self._seed, *rules):
            state[target] = state[source]

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PromptChunk]) -> None:
        """Runs chunks of different prompts in one pass."""
        sizes = self.model.spec.talker
        chunks = sorted(chunks, key=lambda chunk: chunk.slot)
        hidden = self.model.model(
            torch.cat([chunk.rows for chunk in chunks]),
            torch.cat([chunk.positions for chunk in chunks]).to(self.model.device),
            self._attention.prompts(self._cache, chunks, sizes.heads // sizes.kv_heads),
        )
        end = 0
        for chunk in chunks:
            end += len(chunk.rows)
            self._hidden[chunk.slot] = hidden[end - 1]

    @torch.inference_mode()
    def step(self, batch: Sequence[StepInput]) -> torch.Tensor:
        """One frame for each slot in `batch`. Nothing waits for the host until the codes are there.

        Returns:
            (batch, groups) int32 on the CPU, in the order of `batch`. If group 0 ends speech, the rest of the row means
            nothing.
        """
        rows = max(row.slot for row in batch) + 1
        columns = [list(self._idle) for _ in range(rows)]
        length = 0
        for row in batch:
            if row.advance is None:
                columns[row.slot] = [1, 0, 0, self.positions, 0, row.frame]
            else:
                advance = row.advance
                columns[row.slot] = [1, 1, advance.text_id, advance.length, advance.rope_position, row.frame]
                length = max(length, advance.length + 1)
        shape = StepShape(rows, length, max(row.width for row in batch), max(row.predictor_width for row in batch))
        self._host_inputs[:, :rows] = torch.tensor(columns).T
        self._host_inputs[:, rows:] = self._host_idle  # a captured step may have more rows
        self._inputs.copy_(self._host_inputs, non_blocking=True)
        if self._text_states is not None and self._host_text_states is not None:
            self._host_text_states.zero_()
            for row in batch:
                if row.advance and row.advance.state is not None:
                    self._host_text_states[row.slot] = row.advance.state
            self._text_states.copy_(self._host_text_states, non_blocking=True)
        codes = self._step(shape) if self._graphs is None else self._graphs.run(shape)
        on_host = codes.to("cpu", torch.int32)  # the one wait: to index on the GPU, the slots would have to go there
        return on_host[[row.slot for row in batch]]

    def _step(self, shape: StepShape) -> torch.Tensor:
        """The codes (rows, groups) int64 of the slots in `_inputs`. Static: no value decides what runs."""
        model, rows = self.model, shape.rows
        speaks, advances, text_ids, places, rope, frames = self._inputs[:, :rows]
        if shape.length:
            length = min(self.positions, -(-shape.length // _LENGTH_STEP) * _LENGTH_STEP)
            x = self._frame_row[:rows] + model.text_table[text_ids]
            if self._text_states is not None:
                x = x + model.project_states(self._text_states[:rows])
            attend = self._attention.steps(self._cache, places, advances, length)
            new = model.model(x, rope[:, None].expand(-1, 3), attend, self._kernels)
            self._hidden[:rows] = torch.where(advances.bool()[:, None], new, self._hidden[:rows])

        is_random = shape.width or shape.predictor_width
        noise = self._kernels.uniform(self._seed[:rows], frames, model.spec.num_code_groups) if is_random else None
        hidden, speaks = self._hidden[:rows], speaks.bool()[:, None]
        logits = penalize(model.codec_head(hidden).float(), self._seen[:rows], self._penalty[:rows])
        logits.index_fill_(1, self._suppressed, -torch.inf)
        if model.spec.min_frames:
            too_early = (frames < model.spec.min_frames)[:, None]
            logits[:, self._ends] = logits[:, self._ends].masked_fill(too_early, -torch.inf)
        first = self._kernels.draw(logits, self._rules.first(rows, shape.width), None if noise is None else noise[0])
        self._seen[:rows] |= speaks & (self._codes == first.unsqueeze(-1))

        first_row = model.embed_codes(first)
        codes, frame_row = self._complete(hidden, first, first_row, shape.predictor_width, noise)
        self._frame_row[:rows] = torch.where(speaks, frame_row, self._frame_row[:rows])
        return codes

    def _complete(
        self, hidden: torch.Tensor, first: torch.Tensor, first_row: torch.Tensor, width: int, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The code predictor's part: all codes of the frames, and the sums of their embeddings."""
        predictor, cache = self.model.code_predictor, self._frame_cache
        if predictor is None or cache is None:
            return first.unsqueeze(1), first_row
        rows, prepared = len(first), prepared_width(width)
        if self._compiled is not None and prepared is not None:
            return self._compiled(hidden, first, first_row, self._predictor_rules.first(rows, prepared), noise)
        rules = self._predictor_rules.first(rows, width)
        return predictor(cache.rows(rows), hidden, first, first_row, rules, noise, self._kernels)
