"""Many sessions of which some speak, on one transport: what each user hears, and what waiting costs the gateway."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.conversations.microphone import Lost
from benchmarks.conversations.transports import TRANSPORTS, Heard, Quiet, UserSession, problem_of
from benchmarks.conversations.utterances import Utterance
from benchmarks.systems.gateways import GatewayProcess
from benchmarks.systems.processes import Groups
from benchmarks.traffic.player import playback_gaps_ms
from cli.scrape import MetricsDelta

_APPEND_S = 0.1
_SETTLE_S, _IDLE_S = 2.0, 5.0  # all are open: before, and while what this costs is measured
_LATEST_START_S, _PAUSE_S = 5.0, (0.5, 2.0)  # of a user; between the end of an answer and the next turn
_AT_ONCE = 16  # sessions that open together: more at once than the system's queue takes would be refused


@dataclass(frozen=True)
class Wait:
    """A turn of a user.

    Attributes:
        first_sound_s: from the user's last audible sample to the answer's first sound.
        gaps_ms: silences within the answer, as a player has them that begins with the first piece.
        error: why there is no answer.
    """

    first_sound_s: float = 0.0
    gaps_ms: Sequence[float] = ()
    error: str | None = None


@dataclass
class Crowd:
    """What was measured of one transport.

    Attributes:
        sessions: that were open.
        quiet: what the sessions send whose users do not speak.
        users: turns of each user who speaks.
        lost: sessions that ended before their time.
        idle_cpu: of a core, the gateway's share while all are open and nobody speaks.
        speaking_cpu: the same while users speak.
        session_kib: resident memory of the gateway a session, before anyone speaks.
        told_s: p50 and p95 of the first sound, by the gateway's own metrics; None: it has none.
        told_underruns: by these.
    """

    sessions: int
    quiet: Quiet
    users: list[list[Wait]] = field(default_factory=list)
    lost: int = 0
    idle_cpu: float = 0.0
    speaking_cpu: float = 0.0
    session_kib: float = 0.0
    told_s: tuple[float | None, float | None] = (None, None)
    told_underruns: float = 0.0

    @property
    def errors(self) -> list[str]:
        return [wait.error for waits in self.users for wait in waits if wait.error]


async def gather_crowd(
    gateway: GatewayProcess,
    transport: str,
    sessions: int,
    quiet: Quiet,
    users: Sequence[Sequence[Utterance]],
    progress: Callable[[], None],
) -> Crowd:
    """Opens sessions, and has as many of them speak as there are `users`, each of whom says some turns.

    Raises:
        Lost: a session could not be opened.
    """
    crowd, groups = Crowd(sessions, quiet), Groups({"gateway": gateway.pid})
    async with AsyncExitStack() as exits:
        empty_bytes, gate = groups.memory_bytes()["gateway"], asyncio.Semaphore(_AT_ONCE)

        async def opened(number: int) -> UserSession:
            sends = "zeros" if number < len(users) and quiet == "nothing" else quiet
            async with gate:
                return await exits.enter_async_context(TRANSPORTS[transport](gateway.url, _APPEND_S, sends))

        all_open = await asyncio.gather(*(opened(number) for number in range(sessions)))
        await asyncio.sleep(_SETTLE_S)
        crowd.idle_cpu = await _share(groups, asyncio.sleep(_IDLE_S))
        crowd.session_kib = (groups.memory_bytes()["gateway"] - empty_bytes) / 1024 / sessions
        before, draw = await asyncio.to_thread(gateway.scrape), random.Random(sessions)
        talks = [
            _talk(one, turns, draw.uniform(0, _LATEST_START_S), progress)
            for one, turns in zip(all_open, users, strict=False)
        ]
        speaking = asyncio.gather(*talks)
        crowd.speaking_cpu = await _share(groups, speaking)
        crowd.lost = sum(one.is_lost for one in all_open)
        told = MetricsDelta(before, await asyncio.to_thread(gateway.scrape))
    crowd.users = [[_wait(*said) for said in user] for user in speaking.result()]
    name = "quartet_gateway_first_sound_seconds"
    crowd.told_s = told.quantile(0.5, name, transport=transport), told.quantile(0.95, name, transport=transport)
    now, earlier = (
        page.total("quartet_gateway_underruns_total", transport=transport) or 0.0 for page in (told.last, told.first)
    )
    crowd.told_underruns = now - earlier
    return crowd


async def _share(groups: Groups, work: Awaitable[object]) -> float:
    """Of a core, what the gateway uses meanwhile."""
    began_s, before_s = time.perf_counter(), groups.cpu_s()["gateway"]
    await work
    return (groups.cpu_s()["gateway"] - before_s) / (time.perf_counter() - began_s)


async def _talk(
    session: UserSession, turns: Sequence[Utterance], begins_s: float, progress: Callable[[], None]
) -> list[tuple[float, Heard | str]]:
    """A user's turns: the last sample's `time.perf_counter`, and the answer, or why there is none."""
    taken, draw = list[tuple[float, Heard | str]](), random.Random(begins_s)
    await asyncio.sleep(begins_s)
    for said in turns:
        last_s = session.say(said.samples) + said.seconds
        try:
            heard = await session.answer()
        except Lost as error:
            taken.append((last_s, str(error)))
            break
        taken.append((last_s, heard))
        progress()
        played_s = (heard.deltas[0].at_s if heard.deltas else heard.end.at_s) + heard.plays_s
        await asyncio.sleep(max(0.0, played_s - time.perf_counter()) + draw.uniform(*_PAUSE_S))
    return taken


def _wait(last_s: float, heard: Heard | str) -> Wait:
    error = heard if isinstance(heard, str) else problem_of(heard)
    if isinstance(heard, str) or error is not None:
        return Wait(error=error)
    pieces = heard.pieces()
    if not pieces:
        return Wait(error="an answer of zeros")
    gaps = playback_gaps_ms((came_s * 1000, plays_s * 1000) for came_s, plays_s in pieces)
    return Wait(pieces[0][0] - last_s, gaps)
