"""One turn of a conversation: a question, and its spoken answer."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.simulation.attempt import Attempt
from benchmarks.simulation.machine import Kind
from gateway.pipeline.route import Lease
from services.common.errors import QueueFull, StageError, Unavailable

if TYPE_CHECKING:
    from benchmarks.simulation.cell import Cell
    from benchmarks.simulation.gateway import SimulatedGateway

_GAP_S = 0.1  # a listener notices


@dataclass
class Session:
    """A conversation.

    Attributes:
        tokens: of its context so far; `user_tokens`: those of the user's turns, which the talker reads.
        gateway: of its WebSocket; None: each turn is a request.
    """

    number: int
    tokens: float
    user_tokens: float
    gateway: "SimulatedGateway | None" = None

    @property
    def key(self) -> bytes:
        """What the gateways choose the thinker by."""
        return b"conversation %d" % self.number


class Turn:
    """Args:
        new_tokens: of the question.
        tokens, frames: of the answer.

    Attributes:
        has_output: the client has some of the answer.
    """

    def __init__(self, cell: "Cell", session: Session, question_s: float, answer_s: float) -> None:
        costs = cell.costs
        self.cell, self.session, self._question_s = cell, session, question_s
        self.new_tokens = question_s * costs.sound_tokens_per_s + costs.text_tokens
        self.tokens = max(1, round(answer_s * costs.tokens_per_s))
        self.frames = max(1, round(answer_s * costs.frames_per_s))
        self.context_tokens = session.tokens + self.new_tokens
        self.user_tokens = session.user_tokens + self.new_tokens
        self.has_output = False
        self._began = cell.clock.wall_s
        self._first_sound: float | None = None
        self._plays_until, self._longest_gap = 0.0, 0.0
        self._held, self._attempt = ExitStack(), None
        self._is_written = self._is_heard = self._ended = False

    def start(self) -> None:
        gateway = self.session.gateway or self.cell.gateway_for_a_connection()
        if gateway is None or gateway.state != "up":
            self._end("lost", "gateway")
            return
        self.gateway = gateway
        try:
            self._held.enter_context(gateway.admit(self))
        except (QueueFull, Unavailable):
            self._end("refused", "gateway")
            return
        costs = self.cell.costs
        work_ms = costs.request_ms
        if self.session.gateway is None:  # a microphone's sound is there already
            work_ms += costs.question_ms * self._question_s
        self.cell.clock.after(gateway.core.work(work_ms), self._route)

    def _route(self) -> None:
        if not self._ended:
            self.cell.results.times["gateway"].append(self.cell.clock.wall_s - self._began)
            self.route = self.gateway.route(f"turn-{self.session.number}", self.session.key)
            self._try()

    def _try(self) -> None:
        if self._ended:
            return
        try:
            leases = self._held.enter_context(self.route.replicas())
        except Unavailable as error:
            self._end("refused", error.origin)
            return
        self._attempt = Attempt(self, leases)
        self.cell.clock.after(self.cell.costs.way_ms / 1000, self._attempt.arrive)

    def refused(self, kind: Kind) -> None:
        self._end("refused", kind)

    def failed(self, kind: Kind, error: StageError, lease: Lease) -> None:
        """Tries again if the product's route says so."""
        self.gateway.check(lease.replica)
        if self.has_output or not self.route.may_retry(error):
            self._end("lost" if self.has_output else "refused", kind)
            return
        self.cell.clock.after(self.gateway.check_all(), self._again, kind, error)

    def _again(self, kind: Kind, error: StageError) -> None:
        if self._ended:
            return
        if self.route.retry(error):
            self.cell.results.retried += 1
            self._try()
        else:
            self._end("refused", kind)

    def delivered(self, frames: int, is_last: bool) -> None:
        """A piece of sound reaches the client, who plays it as soon as what came before has been played."""
        now = self.cell.clock.wall_s
        if self._first_sound is None:
            self._first_sound, self._plays_until = now, now
        self._longest_gap = max(self._longest_gap, now - self._plays_until)
        self._plays_until = max(now, self._plays_until) + frames / self.cell.costs.frames_per_s
        self._is_heard = is_last
        self._end_if_whole()

    def written(self) -> None:
        """The answer's last token reaches the client."""
        self._is_written = True
        self._end_if_whole()

    def _end_if_whole(self) -> None:
        if self._is_heard and self._is_written:
            self.session.tokens = self.context_tokens + self.tokens
            self.session.user_tokens = self.user_tokens
            self._end("answered", "")

    def gateway_lost(self) -> None:
        self._end("lost", "gateway")

    def _end(self, outcome: str, where: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self._attempt is not None:
            self._attempt.cancel()
        self._held.close()
        first_s = None if self._first_sound is None else self._first_sound - self._began
        self.cell.results.ended(self._began, outcome, where, first_s, self._longest_gap > _GAP_S)
        now = self.cell.clock.wall_s
        self.cell.sessions.answered(self.session, max(0.0, self._plays_until - now))
