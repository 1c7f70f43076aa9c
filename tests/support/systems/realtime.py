"""`/v1/realtime` before real stages: users who speak, and what is left when they are gone."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conversations.utterances import RATE_HZ, silence, utterance
from benchmarks.systems.gateways import GatewayProcess, gateway, pipeline
from benchmarks.systems.holdings import HELD
from gateway.dialects.realtime.audio import InputAudioStream
from gateway.dialects.realtime.input.turn_detector import STEP_MS, SpeechEnd, SpeechStart, TurnDetector
from gateway.dialects.realtime.settings.session_config import ServerVad
from gateway.listening.detector import Detectors
from tests.support.clients.realtime_client import Gateway, RealtimeClient, base64_of, session
from tests.support.clients.speech import ENDLESS_SPEECH, ENDLESS_TOKENS
from tests.support.samples.espeak import speaker_or_skip
from tests.support.systems.stack import HANG_GUARD_S, Stack

GREEDY = {"temperature": 0, "max_tokens": 12}, {"temperature": 0, "max_frames": 24}
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": ENDLESS_TOKENS}, ENDLESS_SPEECH
OPEN = ("quartet_gateway_realtime_sessions", "quartet_gateway_running_requests")  # 0 in a gateway with nothing to do
_APPEND = RATE_HZ // 10


@contextmanager
def gateway_of(stack: Stack, directory: Path, sampling: tuple[dict, dict], *flags: str) -> Iterator[GatewayProcess]:
    """Another gateway before the stages of `stack`, whose requests have these defaults: (thinker's, talker's)."""
    base, access = Path(stack.state["pipeline"]), stack.access.flags if stack.access else []
    file = pipeline(directory / "pipeline.yaml", *sampling, base)
    patient = f"--health-timeout-s={HANG_GUARD_S}"  # as in tests/support/systems/stack.py
    with gateway(stack.addresses, file, directory / "gateway.log", patient, *access, *flags) as started:
        yield started


@asynccontextmanager
async def conversation(gateway: Gateway, key: str, **settings: Any):
    """A session with `settings`, as in session.update."""
    headers = {"authorization": f"Bearer {key}"}
    async with session(gateway, None, additional_headers=headers, max_queue=None) as client:
        if settings:
            await client.ask("session.update", "session.updated", session={"type": "realtime"} | settings)
        yield client


def spoken(*clauses: str, voice: str = "en-us", seed: int | None = None) -> list[np.ndarray]:
    """What a user says, each clause by itself: (n,) int16 at 24 kHz, with the noise of `seed`."""
    speaker = speaker_or_skip(voice)
    return [utterance(speaker, [clause], seed=seed).samples for clause in clauses]


async def send(client: RealtimeClient, *sounds: np.ndarray) -> None:
    """Appends sounds, (n,) int16, as fast as they are taken."""
    sound = np.concatenate(sounds)
    for begin in range(0, len(sound), _APPEND):
        piece = sound[begin : begin + _APPEND].astype("<i2").tobytes()
        await client.send("input_audio_buffer.append", audio=base64_of(piece))


async def turn(client: RealtimeClient, *sounds: np.ndarray) -> list[dict[str, Any]]:
    """A turn and the silence that ends it; all events until its answer is done."""
    await send(client, *sounds, silence(1.0))
    return await client.until("response.done")


def heard(sound: np.ndarray) -> np.ndarray:
    """(n,) int16 at 16 kHz of what `send` sends: in its very pieces, as the resampler's rounding differs by them."""
    reader, pieces = InputAudioStream("audio/pcm"), (sound[at : at + _APPEND] for at in range(0, len(sound), _APPEND))
    return np.concatenate([*(reader.add(piece.astype("<i2").tobytes()) for piece in pieces), reader.flush()])


async def cuts_of(sound: np.ndarray) -> list[tuple[int, int]]:
    """(begin, end) in milliseconds of the sound of each turn that server_vad finds, by its defaults."""
    with closing(Detectors()) as detectors:
        probabilities = await detectors.open().add(heard(sound))
    turns, cuts, begin = TurnDetector(ServerVad()), list[tuple[int, int]](), 0
    for number, probability in enumerate(probabilities, 1):
        for event in turns.add(probability, number * STEP_MS):
            match event:
                case SpeechStart(start_ms):
                    begin = start_ms
                case SpeechEnd(_, cut_ms):
                    cuts.append((begin, cut_ms))
    return cuts


async def work_began(gateway: GatewayProcess, count: int = 1) -> Callable[[], Awaitable[None]]:
    """What returns when the gateway has sent the thinker `count` more requests than now."""

    def sent() -> float:
        return gateway.scrape().total("quartet_gateway_replica_requests_total", stage="thinker") or 0.0

    before = await asyncio.to_thread(sent)

    async def wait() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            while await asyncio.to_thread(sent) < before + count:
                await asyncio.sleep(0.02)

    return wait


async def nothing_left(stack: Stack, gateways: Sequence[GatewayProcess]) -> None:
    """Returns when no session is open, no request under way, and no stage holds anything of one."""

    def left() -> dict[str, float]:
        pages = {stage: (stack.page(stage), HELD) for stage in stack.addresses}
        pages |= {each.url: (each.scrape(), OPEN) for each in gateways}
        told = {f"{place} {name}": page.total(name) for place, (page, names) in pages.items() for name in names}
        return {name: value for name, value in told.items() if value}

    held = {"not asked": 1.0}
    async with asyncio.timeout(HANG_GUARD_S):
        while held:
            held = await asyncio.to_thread(left)
