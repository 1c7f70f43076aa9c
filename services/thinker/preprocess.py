"""From a conversation to a prompt: chat template, media decoding, multimodal processing."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from services.common.errors import InvalidInput, InvalidMedia, RequestCancelled
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Cut, MediaFile, Prompt, runs
from services.thinker.engine import ThinkerEngine
from services.thinker.media import (
    Spent,
    decode_audio,
    decode_image,
    decode_video,
    image_size,
    sound_length,
    video_track,
)
from services.thinker.scaling import Scaler
from services.thinker.template import ChatTemplate
from services.thinker.tokens import Stop, refuse_longer

Result = TypeVar("Result")
_NO_TOKEN = -1
_MOST_CUT = 8  # contexts of a prompt that is cut to one
_LONG_TEXT = 65_536  # characters
_NO_MIX = "leave use_audio_in_video out, and send each video's file again, as an audio part after it"


class Preprocessor:
    """Makes prompts. Texts, long texts and media have threads of their own, and none waits for the others. vLLM's
    multimodal processor runs in vLLM's thread."""

    def __init__(self, settings: ThinkerSettings, engine: ThinkerEngine) -> None:
        self._settings = settings
        self._checkpoint = engine.checkpoint
        self._engine = engine
        self._media = ThreadPoolExecutor(settings.preprocessing_threads, thread_name_prefix="media")
        self._texts = ThreadPoolExecutor(settings.preprocessing_threads, thread_name_prefix="text")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self.template = ChatTemplate(engine.checkpoint)
        self._scaler = Scaler(engine.checkpoint)

    async def read(self, size: int, call: Callable[..., Result], *arguments: Any) -> Result:
        """What a method of `template` returns in a thread, for texts of `size` characters, or so many tokens.

        Cancelling leaves at once, and soon ends the method, too.
        """
        return await self._in_thread(self._long_texts if size > _LONG_TEXT else self._texts, call, *arguments)

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., Result], *arguments: Any) -> Result:
        gone = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments, gone.is_set)
        finally:
            gone.set()

    async def prepare(self, conversation: Conversation) -> Prompt:
        """The prompt of `conversation`. Cancelling leaves at once; a decoder that runs ends in its thread.

        Raises:
            InvalidInput: names the field: media that cannot be decoded, a conversation that the chat template
                refuses, or a prompt that leaves no room for an answer.
        """
        most, field, size = self._engine.max_context_tokens, conversation.field, conversation.characters
        most_read = most if conversation.cut is None else _MOST_CUT * most
        refuse_longer(self.template.least(conversation), most_read, field, is_whole=False)
        whole = await self.read(size, self.template.apply, conversation, most_read)
        token_ids = self._shortened(whole, conversation.cut)
        refuse_longer(len(token_ids), most, field)
        thinks, has_media = self._checkpoint.reasoning, conversation.media
        has_end = token_ids is whole or token_ids == whole[len(whole) - len(token_ids) :]
        opens_thought = has_end and bool(thinks) and await self.read(size, self.template.opens_thought, conversation)
        decoding = (self._media, self._decode, conversation, len(token_ids))
        media, options = await self._in_thread(*decoding) if has_media else ({}, {})
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

    def _decode(
        self, conversation: Conversation, tokens: int, stop: Stop
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """The decoded media by kind, and vLLM's options for them. Pictures are scaled before the next is decoded.

        Args:
            tokens: of the text, each medium with one.
        """
        self._refuse_large(conversation, tokens)
        spent = Spent(self._settings)
        settings, rate = self._settings, self._checkpoint.sample_rate_hz
        media: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
        silent: list[MediaFile] = []
        for file in conversation.media:
            if stop():
                raise RequestCancelled("nobody waits for the media any more")
            if file.kind == "image":
                media["image"].append(self._scaler.image(decode_image(file, settings)))
            elif file.kind == "audio":
                media["audio"].append(self._long_enough(file, decode_audio(file, rate, settings, spent, stop)))
            else:
                video = decode_video(file, rate, self.sample_frames, settings, spent, stop, self._scaler.frame)
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
        return {kind: items for kind, items in media.items() if items}, options

    def _refuse_large(self, conversation: Conversation, tokens: int) -> None:
        """Raises InvalidInput: by the headers, the media cost more than is allowed, or fill the context."""
        spent, settings, scaler = Spent(self._settings), self._settings, self._scaler
        for file in conversation.media:
            if file.kind == "image":
                tokens += scaler.image_tokens(*image_size(file, settings, spent)) - 1
            elif file.kind == "audio":
                tokens += scaler.least_sound_tokens(sound_length(file, settings, spent)) - 1
            else:
                track = video_track(file, self.sample_frames, settings, spent)
                tokens += scaler.video_tokens(len(track.wanted), *track.size) - 1
            refuse_longer(tokens, self._engine.max_context_tokens, conversation.field, is_whole=False)

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
        refuse_longer(len(token_ids), self._engine.max_context_tokens, field)
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

    def close(self) -> None:
        for pool in (self._media, self._texts, self._long_texts):
            pool.shutdown(wait=False, cancel_futures=True)
