"""Stages' clocks against the gateway's, to align spans of several hosts."""

import time
from dataclasses import dataclass

from gateway.pipeline.replica import Replica
from quartet.v1 import profile_pb2, profile_pb2_grpc

SAMPLES = 5


@dataclass(frozen=True)
class Clock:
    """A stage's Unix clock: its lead, and the greatest error, half of a round trip."""

    ahead_ns: int
    uncertain_ns: int

    @property
    def offset_ns(self) -> int:
        """To subtract from the stage's times: 0 unless the clocks certainly differ."""
        return self.ahead_ns if abs(self.ahead_ns) > self.uncertain_ns else 0


async def spans_of(replica: Replica, request_id: str, timeout_s: float) -> tuple[profile_pb2.GetSpansResponse, Clock]:
    """A request's spans in `replica`, and its clock. Raises grpc.aio.AioRpcError."""
    stub = profile_pb2_grpc.ProfileServiceStub(replica.channel)
    sent_ns = time.time_ns()
    answer = await stub.GetSpans(profile_pb2.GetSpansRequest(request_id=request_id), timeout=timeout_s)
    came_ns = time.time_ns()
    ahead_ns = (answer.received_unix_ns - sent_ns + answer.answered_unix_ns - came_ns) // 2
    there_ns = answer.answered_unix_ns - answer.received_unix_ns
    return answer, Clock(ahead_ns, max(0, came_ns - sent_ns - there_ns) // 2)


async def clock_of(replica: Replica, timeout_s: float) -> Clock:
    """The clock by the quickest of SAMPLES calls. Raises grpc.aio.AioRpcError."""
    clocks = [(await spans_of(replica, "", timeout_s))[1] for _ in range(SAMPLES)]
    return min(clocks, key=lambda clock: clock.uncertain_ns)
