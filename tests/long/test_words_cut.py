"""Who interrupts the demo has heard some of its words, and the conversation says which, to one word.

When each word is heard, pocketsphinx says, which aligns the sound that came; it knows nothing of our aligner."""

import asyncio
import base64
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import soxr

from tests.support.samples.words import SPEECH_HZ, SPOKEN, drawn
from tests.support.systems.realtime import conversation
from tests.support.systems.stack import START_TIMEOUT_S, Stack, running
from training.judges import plain

pytestmark = [pytest.mark.e2e, pytest.mark.weekly, pytest.mark.timeout(START_TIMEOUT_S)]
_LISTENS_HZ, _FRAME_MS = 16_000, 10.0
_DITHER = 3e-4  # of full scale
_CUTS = 60
_ALIGNED_S = 0.5  # nobody interrupts sooner what is spoken in seconds


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(None, tmp_path_factory.mktemp("cut")) as stack:  # with the aligner
        yield stack


@dataclass
class Spoken:
    """An answer: its text, and its sound, (n,) int16."""

    transcript: str
    samples: np.ndarray


def middles_of(spoken: Spoken) -> list[float] | None:
    """In ms, of each word; None: pocketsphinx does not find them, or does not know one."""
    from pocketsphinx import Decoder

    decoder = Decoder(samprate=_LISTENS_HZ, loglevel="FATAL")
    sound = soxr.resample(spoken.samples.astype(np.float32) / 32768, SPEECH_HZ, _LISTENS_HZ)
    sound = sound + np.random.default_rng(0).normal(0, _DITHER, len(sound))
    words = plain(spoken.transcript)
    try:
        decoder.set_align_text(words)
    except RuntimeError:
        return None
    decoder.start_utt()
    decoder.process_raw((sound.clip(-1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
    decoder.end_utt()
    found = [word for word in decoder.seg() or () if word.word[0] not in "<[("]
    if len(found) != len(words.split()):
        return None
    return [_FRAME_MS * (word.start_frame + word.end_frame + 1) / 2 for word in found]


async def ask(client, question: str) -> tuple[str, Spoken]:
    """(item, answer) of one of the demo's spoken answers."""
    content = [{"type": "input_text", "text": question}]
    await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    await client.send("response.create")
    events = await client.until("response.done")
    sound = b"".join(
        base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"
    )
    (item,) = events[-1]["response"]["output"]
    return item["id"], Spoken(item["content"][0]["transcript"], np.frombuffer(sound, "<i2"))


async def cut(client, item_id: str, end_ms: int) -> str:
    """The transcript that is left of an item."""
    await client.ask(
        "conversation.item.truncate",
        "conversation.item.truncated",
        item_id=item_id,
        content_index=0,
        audio_end_ms=end_ms,
    )
    found = await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item_id)
    return found["item"]["content"][0]["transcript"]


async def test_a_cut_answer_ends_within_one_word_of_what_was_played(served: Stack) -> None:
    draw, errors = random.Random("cut"), list[int]()
    questions = [dialogue.turns[-1].question for dialogue in drawn(_CUTS, SPOKEN, "cut")]
    for question in questions:
        async with conversation(served, served.key, output_modalities=["audio"]) as client:
            item_id, spoken = await ask(client, question)
            middles_ms = await asyncio.to_thread(middles_of, spoken)
            if middles_ms is None:
                continue
            await asyncio.sleep(_ALIGNED_S)
            end_ms = draw.randrange(int(1000 * len(spoken.samples) / SPEECH_HZ))
            left = await cut(client, item_id, end_ms)
            errors.append(len(plain(left).split()) - sum(middle_ms <= end_ms for middle_ms in middles_ms))
    print("words of the transcript less words heard:", {error: errors.count(error) for error in sorted(set(errors))})
    assert len(errors) >= _CUTS / 2
    # An answer whose sound is not its words has no place for them.
    assert sum(abs(error) <= 1 for error in errors) >= 0.95 * len(errors)
