"""From a conversation to a prompt: chat template, media decoding, multimodal processing."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from services.common.errors import ContextTooLong, InvalidInput, InvalidMedia
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Cut, MediaFile, Prompt, runs
from services.thinker.engine import ThinkerEngine
from services.thinker.media import decode_audio, decode_image, decode_video
from services.thinker.template import ChatTemplate

Result = TypeVar("Result")
_NO_TOKEN = -1
_NO_MIX = "leave use_audio_in_video out, and send each video's file again, as an audio part after it"


class Preprocessor:
    """Makes prompts. Decoding runs in threads of its own, vLLM's multimodal processor in vLLM's thread."""

    def __init__(self, settings: ThinkerSettings, engine: ThinkerEngine) -> None:
        self._settings = settings
        self._checkpoint = engine.checkpoint
        self._engine = engine
        self._pool = ThreadPoolExecutor(settings.preprocessing_threads, thread_name_prefix="preprocess")
        self.template = ChatTemplate(engine.checkpoint)

    async def in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """What `call` returns in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def prepare(self, conversation: Conversation) -> Prompt:
        """The prompt of `conversation`. Cancelling leaves at once; a decoder that runs ends in its thread.

        Raises:
            InvalidInput: names the field: media that cannot be decoded, a conversation that the chat template
                refuses, or a prompt that leaves no room for an answer.
        """
        token_ids, media, options, opens_thought = await self.in_thread(self._decode, conversation)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if media:
            prompt |= {"multi_modal_data": media, "mm_processor_kwargs": options}
            if "audio" in media:
                prompt["multi_modal_uuids"] = {kind: [None] * len(items) for kind, items in media.items()} | {
                    "audio": self._checkpoint.sound_ids([samples for samples, _ in media["audio"]])
                }
        try:
            engine_input: Any = await self._engine.renderer.process_for_engine_async(prompt, time.time())
        except ValueError as error:  # its text quotes vLLM's objects
            raise InvalidMedia(conversation.field, "the model takes no media of such a size or length") from error
        return self._prompt(engine_input, opens_thought, conversation.field)

    def _decode(self, conversation: Conversation) -> tuple[list[int], dict[str, list[Any]], dict[str, Any], bool]:
        """Token ids with one placeholder for each medium, the decoded media by kind, vLLM's options for them, and
        whether the prompt ends in a thought."""
        whole = self.template.apply(conversation)
        token_ids = self._shortened(whole, conversation.cut)
        self._refuse_longer(len(token_ids), conversation.field)
        settings, rate = self._settings, self._checkpoint.sample_rate_hz
        media: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
        silent: list[MediaFile] = []
        for file in conversation.media:
            if file.kind == "image":
                media["image"].append(decode_image(file, settings))
            elif file.kind == "audio":
                media["audio"].append(self._long_enough(file, decode_audio(file, rate, settings)))
            else:
                video = decode_video(file, rate, self.sample_frames, settings)
                media["video"].append(video.frames)
                if conversation.use_audio_in_video and video.sound is not None:
                    media["audio"].append(self._long_enough(file, video.sound))
                else:
                    silent.append(file)
        options: dict[str, Any] = {}
        if media["video"]:
            options["fps"] = settings.video_fps
            if conversation.use_audio_in_video and len(silent) < len(media["video"]):
                if silent:
                    raise InvalidInput(silent[0].field, f"has no sound track, but another video has one: {_NO_MIX}")
                if len(media["audio"]) > len(media["video"]):
                    raise InvalidInput("use_audio_in_video", f"must not be set beside audio parts: {_NO_MIX}")
                options["use_audio_in_video"] = True
        media["audio"] = [(wave, rate) for wave in media["audio"]]
        has_end = token_ids == whole[len(whole) - len(token_ids) :]
        opens_thought = has_end and self.template.opens_thought(conversation)
        return token_ids, {kind: items for kind, items in media.items() if items}, options, opens_thought

    def sample_frames(self, total: int, rate: float) -> np.ndarray:
        """Indices of `video_fps` frames a second, as transformers' video processor samples them."""
        from transformers.video_utils import VideoMetadata

        processor = self._checkpoint.processor.video_processor
        if total < processor.temporal_patch_size:
            return np.zeros(processor.temporal_patch_size, dtype=np.int64)
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        return np.asarray(processor.sample_frames(metadata, fps=self._settings.video_fps))

    def _long_enough(self, file: MediaFile, samples: np.ndarray) -> np.ndarray:
        window = self._checkpoint.processor.feature_extractor.n_fft
        if len(samples) <= window:
            least_ms = 1000 * window / self._checkpoint.sample_rate_hz
            raise InvalidMedia(file.field, f"its sound must last longer than {least_ms:g} ms")
        return samples

    def _prompt(self, engine_input: Any, opens_thought: bool, field: str) -> Prompt:
        token_ids = list(engine_input["prompt_token_ids"])
        self._refuse_longer(len(token_ids), field)
        ids, placeholders = np.asarray(token_ids), self._checkpoint.placeholders
        audio = ids == placeholders.get("audio", _NO_TOKEN)
        image = np.isin(ids, [placeholders.get("image", _NO_TOKEN), placeholders.get("video", _NO_TOKEN)])
        return Prompt(token_ids, runs(audio | image), int(audio.sum()), int(image.sum()), engine_input, opens_thought)

    def _shortened(self, token_ids: list[int], cut: Cut | None) -> list[int]:
        """Raises InvalidInput: so many tokens leave no room for an answer."""
        if cut is None:
            return token_ids
        room = self._engine.max_context_tokens - 1
        if cut.most > room:
            raise InvalidInput("truncate_prompt_tokens", f"must be at most {room}; -1 is as many as there is room for")
        most = room if cut.most < 0 else cut.most
        side = self._checkpoint.tokenizer.truncation_side
        keeps_last = side == "left" if cut.keeps_last is None else cut.keeps_last
        return token_ids[max(0, len(token_ids) - most) :] if keeps_last else token_ids[:most]

    def _refuse_longer(self, tokens: int, field: str) -> None:
        most = self._engine.max_context_tokens
        if tokens >= most:
            raise ContextTooLong(field, f"the prompt has {tokens} tokens; the limit is {most} with the answer included")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
