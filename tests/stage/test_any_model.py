"""Models of vLLM that no family's row is about: the thinker writes what transformers writes, token for token."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from PIL import Image

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, Message, RawPrompt
from services.thinker.media import Spent, decode_audio, decode_image, decode_video, video_track
from tests.support.samples.media import mp4, png, wav
from tests.support.stage.thinking import Thinking, thinking
from tests.support.tiers import tiered
from tests.support.weights import text_models
from tests.support.weights.text_models import HEARING, MODELS, PICTURED, UNIFIED, text_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = "gemma3_images"  # windows and whole attention, a vocabulary of words, pictures
OF_THE_GATE = ("granite_hybrid", "glm4_moe", "qwen3_vl", "qwen2_audio", *UNIFIED)  # those whose code differs most
TOKENS = 20
RATE_HZ = 16_000
SEEING = (*PICTURED, *UNIFIED)
# vLLM's own answers are not those of transformers for these weights, with and without Quartet.
DIFFERENT = ("deepseek_v2",)


@dataclass
class Served:
    """An engine (real processes) with its preprocessor, and the reference on the same checkpoint."""

    name: str
    thinking: Thinking
    reference: Any

    @property
    def settings(self) -> ThinkerSettings:
        return self.thinking.settings

    @property
    def engine(self) -> Any:
        return self.thinking.engine

    @property
    def preprocessor(self) -> Any:
        return self.thinking.preprocessor

    async def run(self, conversation: Conversation, **sampling: Any) -> tuple[Any, list[int], str | None]:
        """(prompt, token ids of the answer, why it ended)."""
        written = await self.thinking.write(conversation, **{"max_tokens": TOKENS, "ignore_eos": True} | sampling)
        return written.prompt, written.ids, written.reason

    async def scores(self, conversation: Conversation) -> torch.Tensor:
        """Log-probabilities of the tokens of the answer, (TOKENS,)."""
        written = await self.thinking.write(conversation, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        assert len(written.scores) == TOKENS
        return written.scores

    @torch.inference_mode()
    def expected(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Token ids of prompt and answer, past any end."""
        ids, length, _ = self._generated(conversation)
        return ids[:length].tolist(), ids[length:].tolist()

    @torch.inference_mode()
    def expected_scores(self, conversation: Conversation) -> torch.Tensor:
        ids, length, logits = self._generated(conversation)
        return logits.log_softmax(-1).gather(1, ids[length:, None])[:, 0]

    def _generated(self, conversation: Conversation) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Token ids of prompt and answer, how many are the prompt's, and the logits of the others."""
        checkpoint = self.engine.checkpoint
        media = self._decoded(conversation)
        if conversation.raw is not None:
            inputs = checkpoint.tokenizer(conversation.raw.text, return_tensors="pt")
        else:
            turns = [{"role": each.role, "content": self._content(each.parts)} for each in conversation.messages]
            text = checkpoint.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            inputs = checkpoint.processor(text=text, return_tensors="pt", add_special_tokens=False, **media)
        options = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1, "eos_token_id": None}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        made = self.reference.generate(**inputs, **options)
        return made.sequences[0], inputs["input_ids"].shape[1], torch.cat(made.logits)

    def _decoded(self, conversation: Conversation) -> dict[str, Any]:
        """The reference's arguments, from the frames and samples that our decoders give."""
        media: dict[str, Any] = {}
        for file in conversation.media:
            if file.kind == "image":
                media.setdefault("images", []).append(Image.fromarray(decode_image(file, self.settings)))
            elif file.kind == "audio":
                media.setdefault("audio", []).append(decode_audio(file, RATE_HZ, self.settings))
            else:
                spent, sampler = Spent(self.settings), self.preprocessor.sample_frames
                track = video_track(file, sampler, self.settings, spent)
                video = decode_video(file, RATE_HZ, sampler, self.settings, track=track)
                times = {"total_num_frames": track.frames, "fps": track.rate, "frames_indices": track.wanted.tolist()}
                media.setdefault("videos", []).append(video.frames)
                media.setdefault("video_metadata", []).append(times)
                media["do_sample_frames"] = False
        return media | ({"sampling_rate": RATE_HZ} if "audio" in media else {})

    def _content(self, parts: list[str | MediaFile]) -> Any:
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        if self.name == "llava":
            return "\n".join([*(["<image>"] * (len(parts) - len(texts))), *texts])
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in parts]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=tiered((name for name in (*MODELS, *SEEING, *HEARING) if name not in DIFFERENT), QUICK, OF_THE_GATE),
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    checkpoint = text_checkpoint(request.param)
    async with thinking(checkpoint, max_batched_tokens=64) as started:
        yield Served(request.param, started, text_models.load(checkpoint))


def said(*parts: Any) -> Conversation:
    return Conversation([Message("user", list(parts))])


TURNS = Conversation(
    [Message("user", ["Which day is it?"]), Message("assistant", ["Monday"]), Message("user", ["No?"])]
)


async def test_answers_are_those_of_transformers_together_and_from_the_prefix_cache(served: Served) -> None:
    conversations = [
        said("hello the world " * 12),
        TURNS,
        said("it's  12,345\n\n\u4f60\u597d caf\u00e9 \U0001f600 <table>"),
        Conversation([], raw=RawPrompt("The old king likes the boat. " * 4)),
    ]
    expected = [served.expected(each) for each in conversations]
    for _ in range(2):
        results = await asyncio.gather(*map(served.run, conversations))
        assert [(prompt.token_ids, ids) for prompt, ids, _ in results] == expected


async def test_answers_about_pictures_are_those_of_transformers(served: Served) -> None:
    picture, other = (MediaFile("image", png(*size), "picture") for size in ((), (96, 64)))
    if served.name not in SEEING:
        assert "image" not in served.engine.checkpoint.placeholders
        return
    conversations = [
        said(picture, "What is this?"),
        Conversation(
            [*said(other, picture, "Both?").messages, Message("assistant", ["a cat"]), *said("Yes?").messages]
        ),
        said("hello the world " * 30, picture, "And this?"),  # behind more than a window and a step
    ]
    expected = [served.expected(each) for each in conversations]
    for _ in range(2):
        results = await asyncio.gather(*map(served.run, conversations))
        assert [(prompt.token_ids, ids) for prompt, ids, _ in results] == expected
    for each in conversations:  # tokens say little of what is seen: with other attention they are often the same
        assert (await served.scores(each) - served.expected_scores(each)).abs().max() < 1e-4
    for (prompt, *_), count in zip(results, (1, 2, 1), strict=True):
        assert prompt.audio_tokens == 0
        assert prompt.image_tokens == sum(end - begin for begin, end in prompt.multimodal) > 0
        assert len(prompt.multimodal) == count


async def test_answers_about_sounds_and_videos_are_those_of_transformers(served: Served) -> None:
    kinds = served.engine.checkpoint.placeholders
    assert ("audio" in kinds, "video" in kinds) == (served.name in HEARING, served.name in ("qwen3_vl", *UNIFIED))
    conversations: list[Conversation] = []
    if "audio" in kinds:
        of_sounds: Any = ((1.3037,), (0.7, 24000, 500.0))
        sound, other = (MediaFile("audio", wav(*of), "sound") for of in of_sounds)
        conversations += [said(sound, "What was said?"), said(other, sound, "Both?")]
    if "video" in kinds:
        conversations += [said(MediaFile("video", mp4(seconds), "video"), "What happens?") for seconds in (2.0, 5.0)]
    for conversation in conversations:
        prompt, ids, _ = await served.run(conversation)
        assert (prompt.token_ids, ids) == served.expected(conversation)
        assert prompt.audio_tokens + prompt.image_tokens == sum(end - begin for begin, end in prompt.multimodal) > 0
        assert (prompt.audio_tokens > 0) == ("audio" in kinds)
    if "video" in kinds:
        heard = Conversation(conversations[0].messages, use_audio_in_video=True)
        with pytest.raises(InvalidInput, match="use_audio_in_video: this model does not hear"):
            await served.preprocessor.prepare(heard)


async def test_an_answer_ends_at_every_end_of_its_generation_config(served: Served) -> None:
    """The checkpoint names one that its answer to this has."""
    asked = said(text_models.ENDS)
    _, answer = served.expected(asked)
    (end,) = served.engine.end_ids - {served.engine.checkpoint.tokenizer.eos_token_id}
    _, ids, reason = await served.run(asked, ignore_eos=False)
    assert (ids, reason) == (answer[: answer.index(end) + 1], "stop")


async def test_a_seed_beside_a_prompt_of_several_steps_ends_nothing(served: Served) -> None:
    long = said("The old king likes the boat. " * 20)
    sampling = {"temperature": 1.0, "seed": 5}
    (prompt, first, _), (_, again, _) = await asyncio.gather(*(served.run(long, **sampling) for _ in range(2)))
    assert len(prompt.token_ids) > served.engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    assert first == again


async def test_no_rows_are_kept_and_none_offered(served: Served) -> None:
    assert served.engine.offered_rows == ["token_ids"]
    assert served.engine._llm.vllm_config.kv_transfer_config is None


async def test_tools_are_refused_where_the_template_has_none(served: Served) -> None:
    tools = [thinker_pb2.Tool(name="look", parameters_json="{}")]
    content = [thinker_pb2.ContentPart(text="hi")]
    start = thinker_pb2.GenerateStart(messages=[thinker_pb2.ChatMessage(role="user", content=content)], tools=tools)
    from services.thinker.generation import Generation

    nothing: Any = None
    generation = Generation(served.engine, served.preprocessor, served.settings, start, None, nothing, None)
    if served.engine.checkpoint.tool_calls is not None:
        await generation.refuse()
        return
    with pytest.raises(InvalidInput, match=r"tools\[0\]: this model has no tools; leave them out"):
        await generation.refuse()
    takes = replace(served.engine.checkpoint, processor=SimpleNamespace(chat_template="{{ tools }}"))
    generation.engine = cast(Any, SimpleNamespace(checkpoint=takes, tool_parser=None, speech_prompts=None))
    with pytest.raises(InvalidInput, match=r"takes tools, but its calls are not known here: set the thinker's --tool"):
        await generation.refuse()


async def test_the_placeholder_of_a_picture_cannot_be_written(served: Served) -> None:
    if served.name not in SEEING:
        return
    token_id = served.engine.checkpoint.placeholders["image"]
    token = served.engine.checkpoint.tokenizer.convert_ids_to_tokens(token_id)
    prompt = await served.preprocessor.prepare(said(f"what is {token}?"))
    assert token_id not in prompt.token_ids
    with pytest.raises(InvalidInput, match=r"must have the placeholder .* 1 times"):
        await served.preprocessor.prepare(
            Conversation([], raw=RawPrompt("no place", files=[MediaFile("image", png(), "picture")]))
        )
