"""One try of a turn: its leases, its places at the replicas, and what each of these makes of the answer."""

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc
from grpc.aio import AioRpcError, Metadata

from benchmarks.simulation.decoder import Decoder, pieces
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.machine import KINDS, Kind, Machine
from benchmarks.simulation.work import Speaking, Writing
from gateway.pipeline.route import Lease
from services.common.errors import QueueFull

if TYPE_CHECKING:
    from benchmarks.simulation.turn import Turn


class Attempt:
    """Args:
    leases: of the stages, in their order; they end with each stage's part.
    """

    def __init__(self, turn: "Turn", leases: list[Lease]) -> None:
        self._turn, self._cell, self._clock = turn, turn.cell, turn.cell.clock
        self._leases: dict[Kind, Lease] = dict(zip(KINDS, leases, strict=True))
        self._machines: dict[Kind, Machine] = {
            kind: self._cell.machines[lease.replica.address] for kind, lease in self._leases.items()
        }
        self._places: dict[Kind, ExitStack] = {kind: ExitStack() for kind in KINDS}
        self._gone = set[Kind]()
        self._sizes = pieces(turn.frames)
        self._at = list(itertools.accumulate(self._sizes))
        self._writing: Writing | None = None
        self._speaking: Speaking | None = None
        self._text, self._input_at = 0, 0.0
        self.is_live = True

    def arrive(self) -> None:
        """Its calls reach the replicas, all at once."""
        for kind, machine in self._machines.items() if self.is_live else ():
            if machine.state == "down":
                self.failed(kind)
                return
            if machine.state == "silent":
                self._gone.add(kind)
                self._clock.after(self._cell.costs.silent_call_s, self.failed, kind)
                continue
            try:
                self._places[kind] = machine.admit(self)
            except QueueFull:
                self.cancel()
                self._turn.refused(kind)
                return
        if self.is_live and "thinker" not in self._gone:
            self._write()

    def lost(self, kind: Kind) -> None:
        """A replica makes nothing more; the gateway has not found out yet."""
        self._gone.add(kind)
        part = self._part(kind)
        if part is not None:
            part.is_live = False

    def failed(self, kind: Kind) -> None:
        """The gateway finds out that a call has failed."""
        if not self.is_live:
            return
        lease = self._leases[kind]
        error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "connection refused")
        reason = self._turn.route.failure(lease, error)
        self.cancel()
        self._turn.failed(kind, reason, lease)

    def cancel(self) -> None:
        """Ends its work everywhere."""
        self.is_live = False
        for kind in KINDS:
            if (part := self._part(kind)) is not None:
                part.end()
            self._end(kind)

    def _part(self, kind: Kind) -> Writing | Speaking | None:
        return {"thinker": self._writing, "talker": self._speaking}.get(kind)

    def _end(self, kind: Kind) -> None:
        self._places[kind].close()
        self._leases[kind].end()

    def _write(self) -> None:
        turn, process = self._turn, self._machines["thinker"].process
        assert isinstance(process.engine, Engine)
        at = sorted({1, turn.tokens, *(frames for frames in self._at if frames < turn.tokens)})
        tokens = turn.context_tokens + turn.tokens
        self._writing = Writing(
            process.engine, process.contexts, turn.session.number, tokens, turn.tokens, at, self._written
        )
        self._input_at = self._clock.wall_s
        delay_s = turn.new_tokens * self._cell.costs.tokenizer_ms / 1000
        self._clock.after(delay_s, process.engine.submit, self._writing)

    def _written(self, count: int) -> None:
        turn, costs = self._turn, self._cell.costs
        if count == 1:
            turn.has_output = True
            self._first("thinker")
            assert self._writing is not None
            self._cell.results.prefilled(self._writing.positions, turn.context_tokens)
            delay_s = (costs.way_ms + costs.states_ms * turn.context_tokens) / 1000
            self._clock.after(delay_s, self._speak)
        self._text = count
        if self._speaking is not None:
            self._speaking.written(count)
        if count == turn.tokens:
            self._end("thinker")
            self._clock.after(costs.way_ms / 1000, self._all_written)

    def _all_written(self) -> None:
        if self.is_live:
            self._turn.written()

    def _speak(self) -> None:
        if not self.is_live or "talker" in self._gone:
            return
        engine = self._machines["talker"].process.engine
        assert isinstance(engine, Engine)
        turn = self._turn
        self._speaking = Speaking(engine, turn.user_tokens, self._at, turn.tokens, self._framed)
        self._speaking.written(self._text)
        self._input_at = self._clock.wall_s
        engine.submit(self._speaking)

    def _framed(self, index: int) -> None:
        if index == 0:
            self._first("talker")
        if index == len(self._at) - 1:
            self._end("talker")
        self._clock.after(self._cell.costs.way_ms / 1000, self._decode, index)

    def _decode(self, index: int) -> None:
        decoder = self._machines["code2wav"].process.engine
        if self.is_live and "code2wav" not in self._gone:
            assert isinstance(decoder, Decoder)
            if index == 0:
                self._input_at = self._clock.wall_s
            decoder.decode(self._sizes[index], index == 0, lambda: self._decoded(index))

    def _decoded(self, index: int) -> None:
        if not self.is_live or "code2wav" in self._gone:
            return
        if index == 0:
            self._first("code2wav")
        is_last = index == len(self._sizes) - 1
        if is_last:
            self._end("code2wav")
        costs, turn = self._cell.costs, self._turn
        work_ms = costs.piece_ms + costs.token_ms * turn.tokens / len(self._sizes)
        delay_s = costs.way_ms / 1000 + turn.gateway.core.work(work_ms)
        self._clock.after(delay_s, self._delivered, self._sizes[index], is_last)

    def _delivered(self, frames: int, is_last: bool) -> None:
        if self.is_live:
            self._turn.delivered(frames, is_last)

    def _first(self, kind: Kind) -> None:
        """Notes how long a stage took for its first output."""
        self._cell.results.times[kind].append(self._clock.wall_s - self._input_at)
