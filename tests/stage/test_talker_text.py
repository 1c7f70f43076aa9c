"""Qwen3-Omni's talker says a text that no thinker wrote: whole, or as it is typed."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.v1 import stream_pb2, talker_pb2
from services.common.errors import InvalidInput
from services.common.stream.tensors import to_message
from services.families.qwen3_omni.talker_text import DEFAULT_INSTRUCTIONS
from services.talker import session
from services.talker.text import GrowingText, TextTokenizer
from tests.hostile.calls import rise
from tests.support.references.qwen3_omni import Reference
from tests.support.samples.conversations import turn
from tests.support.stage.talker import GUARD_S, ServedTalker, requests

pytestmark = pytest.mark.asyncio(loop_scope="module")
FRAMES = 24
TEXT = "The boats go out at 7, and they come back when the wind turns. Don't they?"
CHINESE = "早上好！我们今天坐船去看海,晚上回来。"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talker(tiny_checkpoint: Path) -> AsyncIterator[ServedTalker]:
    async with ServedTalker(tiny_checkpoint) as served:
        yield served


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> TextTokenizer:
    return TextTokenizer(tiny_checkpoint)


def start(text: str = "", **fields: Any) -> talker_pb2.SpeakStart:
    sampling = talker_pb2.TalkerSampling(temperature=0, max_frames=FRAMES)
    instructions = fields.pop("instructions", "")
    said = talker_pb2.SpokenText(text=text, instructions=instructions)
    return talker_pb2.SpeakStart(request_id=uuid.uuid4().hex, text=said, sampling=sampling, **fields)


def inline(prompt: list[int], answer: list[int], speaker: str) -> talker_pb2.SpeakStart:
    """What a thinker sends for its answer."""
    ids = to_message(torch.tensor([*prompt, *answer], dtype=torch.int32))
    rows = [stream_pb2.Rows(name="token_ids", first_position=0, tensor=ids)]
    header = stream_pb2.StreamHeader(prompt_positions=len(prompt))
    sent = talker_pb2.InlineThinkerOutput(header=header, rows=rows)
    return talker_pb2.SpeakStart(request_id=uuid.uuid4().hex, inline=sent, speaker=speaker, sampling=start().sampling)


@pytest.mark.parametrize("text", [TEXT, CHINESE, "Hm", "<|im_end|> is no sign here. <|audio_pad|>"])
@pytest.mark.parametrize("instructions", ["", "Whisper it, and slowly."])
async def test_it_sounds_as_if_a_thinker_had_written_it(
    talker: ServedTalker, tiny_checkpoint: Path, text: str, instructions: str
) -> None:
    """After the same user turn. What a thinker's rows become is compared with transformers elsewhere."""
    processor = Reference(tiny_checkpoint).processor
    asked = [turn("user", instructions or DEFAULT_INSTRUCTIONS)]
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=True)[0]
    answer = processor.tokenizer(text, split_special_tokens=True)["input_ids"]
    speaker = talker.family.spec.speakers[-1]
    expected, _ = await talker.call(inline(prompt, answer, speaker))
    codes, summary = await talker.call(start(text, instructions=instructions, speaker=speaker))
    assert len(codes) == summary.frames > 1
    assert torch.equal(codes, expected)
    assert summary.text_tokens == len(answer)


async def test_voice_and_instructions_are_heard(talker: ServedTalker) -> None:
    asked = [start(TEXT), start(TEXT, instructions="Shout."), start(TEXT, speaker=talker.family.spec.speakers[1])]
    said = await asyncio.gather(*map(talker.call, asked))
    assert len({codes.numpy().tobytes() for codes, _ in said}) == len(asked)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",))) | st.text("ab1 \n'!.sé́中"), data=st.data())
async def test_ids_do_not_depend_on_how_the_text_is_cut(
    tokenizer: TextTokenizer, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    typed, ids = GrowingText(tokenizer), list[int]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        typed.add(text[begin:end])
        ids += typed.take_text().ids
    typed.finish()
    ids += typed.take_text().ids
    assert ids == tokenizer.encode(text.strip())
    assert typed.tokens == len(ids)
    assert typed.is_empty == (not text.strip())


@pytest.mark.parametrize("token", ["<think>", "</tool_call>", "<|im_end|>", "<tts_pad>", "<|audio_pad|>"])
async def test_an_added_token_is_text_as_any_other(tokenizer: TextTokenizer, token: str) -> None:
    assert len(tokenizer.encode(token)) > 1
    assert tokenizer.encode(f"a{token}b") == [id for part in ("a", token, "b") for id in tokenizer.encode(part)]


async def test_a_word_without_end_is_not_held_for_ever(tokenizer: TextTokenizer) -> None:
    typed, early = GrowingText(tokenizer), 0
    for _ in range(2000):
        typed.add("a")
        early += bool(typed.take_text().ids)
    assert early == 3  # after each 501 letters, less the last of them
    typed.finish()
    assert typed.tokens == sum(len(tokenizer.encode("a" * letters)) for letters in (500, 500, 500, 500))


@pytest.mark.parametrize("pieces", [list(TEXT), TEXT.split(" "), [TEXT[:30], "", TEXT[30:]]])
async def test_a_text_in_pieces_sounds_like_the_whole(talker: ServedTalker, pieces: list[str]) -> None:
    if pieces == TEXT.split(" "):
        pieces = [f"{piece} " for piece in pieces]
    whole, summary = await talker.call(start(TEXT))
    codes, typed = await talker.call(start(pieces[0]), pieces[1:])
    assert torch.equal(codes, whole)
    assert (typed.text_tokens, typed.end) == (summary.text_tokens, summary.end)


async def test_text_that_is_late_parks_the_speech_and_another_goes_on(talker: ServedTalker) -> None:
    whole, _ = await talker.call(start(TEXT))
    more: asyncio.Queue[str | None] = asyncio.Queue()

    async def typed() -> AsyncIterator[str]:
        while (text := await more.get()) is not None:
            yield text

    call = talker.stub.Speak(requests(start(TEXT[:21]), typed()))
    known = len(TextTokenizer.encode(_tokenizer(talker), TEXT[:21].rsplit(" ", 1)[0]))
    frames = 0
    async with asyncio.timeout(GUARD_S):
        while frames < known:
            response = await call.read()
            frames += response.frames.tensor.shape[0] if response.HasField("frames") else 0
    assert frames == known
    other, _ = await talker.call(start(TEXT))
    assert torch.equal(other, whole)
    more.put_nowait(TEXT[21:])
    more.put_nowait(None)
    async with asyncio.timeout(GUARD_S):
        while not (response := await call.read()).HasField("summary"):
            frames += response.frames.tensor.shape[0]
    assert frames == response.summary.frames == len(whole)
    assert response.summary.waited_for_text_ms > 0


def _tokenizer(talker: ServedTalker) -> TextTokenizer:
    assert talker.family.text_input is not None
    return talker.family.text_input.args[1]  # pyright: ignore[reportFunctionMemberAccess]


async def test_a_writer_who_leaves_frees_the_slot(talker: ServedTalker) -> None:
    async def silent() -> AsyncIterator[str]:
        yield "go on "
        await asyncio.Event().wait()

    call = talker.stub.Speak(requests(start("Now we "), silent()))
    async with asyncio.timeout(GUARD_S):
        while not (await call.read()).HasField("frames"):
            pass
        call.cancel()
        while talker.admission.in_flight or len(talker.engine._free) < 4:
            await asyncio.sleep(0.01)


async def test_a_writer_who_is_silent_for_long_gives_the_slot_up(
    talker: ServedTalker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent() -> AsyncIterator[str]:
        yield "go on "
        await asyncio.Event().wait()

    monkeypatch.setattr(session, "TEXT_TIMEOUT_S", 0.1)
    with pytest.raises(InvalidInput, match="no more of it came"):
        await talker.call(start("Now we "), silent())


async def test_a_text_without_end_is_not_kept(talker: ServedTalker) -> None:
    async def endless(pieces: int) -> AsyncIterator[str]:
        for _ in range(pieces):
            yield "The boats go out. " * 100
        await asyncio.Event().wait()

    whole = start("All of it: ")
    whole.text.whole_text_first = True
    with pytest.raises(InvalidInput, match="more than the 300 tokens"):
        await talker.call(whole, endless(3))
    _, summary = await talker.call(start("As it comes: "), endless(20))  # 10,000 tokens
    assert (summary.frames, summary.text_tokens < 3000) == (FRAMES, True)


@pytest.mark.parametrize("field", ["top_k", "predictor_top_k"])
async def test_more_codes_than_there_are_keep_all(talker: ServedTalker, field: str) -> None:
    """As many as asked for would be 1 GiB."""
    asked, same = start("Hm"), start("Hm")
    for sampling, value in ((asked.sampling, 2**27), (same.sampling, 0)):
        sampling.MergeFrom(talker_pb2.TalkerSampling(temperature=1, predictor_temperature=1, seed=7, max_frames=2))
        setattr(sampling, field, value)
    with rise(os.getpid()) as cost:
        codes, _ = await talker.call(asked)
    assert torch.equal(codes, (await talker.call(same))[0])
    assert cost.mib < 512


async def test_instructions_without_end_are_refused(talker: ServedTalker) -> None:
    with pytest.raises(InvalidInput, match=r"text\.instructions: has 1000000 characters"):
        await talker.call(start("Hm", instructions="x" * 1_000_000))


@pytest.mark.parametrize("pieces", [[""], [" \n "], ["", "  ", "\n"]])
async def test_nothing_to_say(talker: ServedTalker, pieces: Iterable[str]) -> None:
    first, *more = pieces
    codes, summary = await talker.call(start(first), more)
    assert (len(codes), summary.end, summary.text_tokens) == (0, talker_pb2.SPEECH_END_EMPTY, 0)


async def test_messages_out_of_place_are_refused(talker: ServedTalker) -> None:
    wrong = {
        "message": [talker_pb2.SpeakRequest(text="no start")],
        "message, then": [talker_pb2.SpeakRequest(start=start("a b")), talker_pb2.SpeakRequest(start=start("c"))],
    }
    for sent in wrong.values():
        with pytest.raises(InvalidInput) as error:
            await _answered(talker, sent)
        assert error.value.field == "message"


async def _answered(talker: ServedTalker, sent: list[talker_pb2.SpeakRequest]) -> None:
    import grpc

    from services.common.rpc.status import from_rpc_error

    try:
        async for _ in talker.stub.Speak(sent):
            pass
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
