"""A family that lacks what the first one has: its talker speaks over gRPC, code for code as a reference."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quartet.v1 import stream_pb2, talker_pb2
from services.common.errors import InvalidInput
from services.registry import FAMILIES, family_of
from services.talker.servicer import talker_info
from tests.support.stage.replay import ReplayedOps
from tests.support.stage.talker import ServedTalker
from tests.support.toy_family import install
from tests.support.toy_family.reference import reference_codes
from tests.support.toy_family.tiny import CONFIG, write

FRAMES = 40
TEXT = "Good morning, all of you!"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(tmp_path_factory.mktemp("site")))
        yield write(tmp_path_factory.mktemp("toy"))


class Toy(ServedTalker):
    """The toy's talker."""

    async def speak(self, text: str, speaker: str = "", **sampling: float) -> tuple[list[int], talker_pb2.SpeakSummary]:
        """Codes of `text`, greedily unless `sampling` says else."""
        rules = talker_pb2.TalkerSampling(**{"temperature": 0, "max_frames": FRAMES, **sampling})
        said = talker_pb2.SpokenText(text=text)
        start = talker_pb2.SpeakStart(request_id=f"say {text}", text=said, speaker=speaker, sampling=rules)
        codes, summary = await self.call(start)
        assert codes.shape[1] == 1
        return codes.flatten().tolist(), summary


@pytest.mark.parametrize("captured", [False, True])
async def test_the_toy_says_what_its_reference_says(checkpoint: Path, captured: bool) -> None:
    async with Toy(checkpoint, ReplayedOps() if captured else None) as toy:
        said = await asyncio.gather(toy.speak(TEXT), toy.speak("Hm", "HIGH"), toy.speak("\N{GRINNING FACE}"))
    asked = ((TEXT, "low"), ("Hm", "high"), ("\N{GRINNING FACE}", "low"))
    for (codes, summary), (text, voice) in zip(said, asked, strict=True):
        assert codes == reference_codes(checkpoint, text, voice, FRAMES)
        assert summary.frames == len(codes) >= CONFIG["shortest"]
    assert len({tuple(codes) for codes, _ in said}) == len(said)


async def test_both_ends_of_speech_end_it_but_not_before_the_least_frames(checkpoint: Path) -> None:
    """Random speech, so that it ends somewhere; what the rules forbid never comes."""
    async with Toy(checkpoint) as toy:
        rules: dict[str, Any] = {"temperature": 2, "top_k": 0, "repetition_penalty": 1, "max_frames": 250}
        said = [await toy.speak(TEXT, seed=seed, **rules) for seed in range(12)]
    ended = [codes for codes, summary in said if summary.end == talker_pb2.SPEECH_END_STOP]
    assert ended
    for codes, _ in said:
        assert len(codes) >= CONFIG["shortest"]
        assert max(codes) < CONFIG["sounds"]


async def test_what_it_lacks_is_refused_by_name(checkpoint: Path) -> None:
    async with Toy(checkpoint) as toy:
        wrong = {
            "source": talker_pb2.SpeakStart(source=stream_pb2.StreamSource(address="x", stream_id="y")),
            "inline": talker_pb2.SpeakStart(inline=talker_pb2.InlineThinkerOutput()),
            "input": talker_pb2.SpeakStart(),
            "text.instructions": talker_pb2.SpeakStart(text={"text": "a", "instructions": "Whisper."}),
            "text.language": talker_pb2.SpeakStart(text={"text": "a", "language": "english"}),
            "text.voice_sample": talker_pb2.SpeakStart(text={"text": "a", "voice_sample": {"text": "b"}}),
            "sampling.predictor_top_k": talker_pb2.SpeakStart(
                text={"text": "a"}, sampling=talker_pb2.TalkerSampling(predictor_top_k=3)
            ),
        }
        for field, start in wrong.items():
            start.request_id = field
            with pytest.raises(InvalidInput) as error:
                await toy.call(start)
            assert error.value.field == field
        codes, summary = await toy.speak("")
        assert not codes
        assert summary.end == talker_pb2.SPEECH_END_EMPTY
        info = talker_info(toy.family, None, 300)
    assert (info.num_code_groups, list(info.speakers)) == (1, ["low", "high"])


def test_a_family_is_known_once_its_package_is_installed(checkpoint: Path) -> None:
    assert family_of(CONFIG).name == "toy"
    assert "toy" not in [family.name for family in FAMILIES]
    with pytest.raises(ValueError, match=r"no family of stages has it .*toy_speaker"):
        family_of({"model_type": "else"})
