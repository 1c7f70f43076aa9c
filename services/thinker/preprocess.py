"""From a conversation to a prompt: chat template, media decoding, multimodal processing."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from services.common.engine.process import lower_priority
from services.common.errors import InvalidInput, InvalidMedia
from services.common.media.calls import Read
from services.common.media.decoders import Decoders
from services.thinker import frames
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Cut, FrameChoice, MediaFile, Prompt, SpokenInput
from services.thinker.engine import ThinkerEngine
from services.thinker.media import (
    Spent,
    VideoTrack,
    decode_audio,
    decode_image,
    decode_video,
    image_size,
    sound_length,
    video_track,
)
from services.thinker.scaling import Scaler
from services.thinker.template import ChatTemplate
from services.thinker.tokens import refuse_longer

Result = TypeVar("Result")
_MOST_CUT = 8  # contexts of a prompt that is cut to one
_LONG_TEXT = 65_536  # characters
_NO_MIX = "leave use_audio_in_video out, and send each video's file again, as an audio part after it"


class Preprocessor:
    """Makes prompts. Texts, long texts and media have threads of their own, and none waits for the others. Each thread
    for media has a process that decodes. vLLM's multimodal processor runs in vLLM's thread."""

    def __init__(self, settings: ThinkerSettings, engine: ThinkerEngine, decoders: Decoders) -> None:
        self._settings = settings
        self._checkpoint = engine.checkpoint
        self._engine = engine
        self._decoders = decoders
        self._media = ThreadPoolExecutor(settings.preprocessing_threads, "media", lower_priority)
        self._texts = ThreadPoolExecutor(settings.preprocessing_threads, "text")
        self._long_texts = ThreadPoolExecutor(1, "long-text", lower_priority)
        self.template = ChatTemplate(engine.checkpoint)
        self._scaler = Scaler(engine.checkpoint)

    async def read(self, size: int, call: Callable[..., Result], *arguments: Any) -> Result:
        """What a method of `template` returns in a thread, for texts of `size` characters, or so many tokens.

        Cancelling leaves at once, and soon ends the method, too.
        """
        gone, pool = threading.Event(), self._long_texts if size > _LONG_TEXT else self._texts
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments, gone.is_set)
        finally:
            gone.set()

    async def prepare(self, conversation: Conversation) -> Prompt:
        """The prompt of `conversation`. Cancelling leaves at once, and soon ends the decoding, too.

        Raises:
            InvalidInput: names the field: media that cannot be decoded, a conversation that the chat template
                refuses, or a prompt that leaves no room for an answer.
        """
        if conversation.spoken is not None:
            return await self._transcription(conversation.spoken)
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
        media, options = await self._decoders.run(*decoding) if has_media else ({}, {})
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
        return self._fitting(Prompt.read(engine_input, opens_thought), conversation.field)

    async def _transcription(self, spoken: SpokenInput) -> Prompt:
        assert self._engine.speech_prompts is not None, "a model without prompts for it was asked to transcribe"
        samples = await self._decoders.run(self._media, self._speech, spoken.file)
        prompt = await self._engine.speech_prompts.prompt(self._engine, samples, spoken)
        return self._fitting(prompt, "transcription")

    def _speech(self, file: MediaFile, read: Read) -> np.ndarray:
        """(samples) float32 of a sound that is to be written down."""
        prompts, settings, spent = self._engine.speech_prompts, self._settings, Spent(self._settings)
        sound_length(file, settings, spent, read)
        samples = decode_audio(file, self._checkpoint.sample_rate_hz, settings, Spent(settings), read)
        most_s = prompts.max_s if prompts else math.inf
        if len(samples) > most_s * self._checkpoint.sample_rate_hz:
            raise InvalidMedia(file.field, f"lasts longer than the {most_s:g} s that the model hears at a time")
        return self._long_enough(file, samples)

    def _decode(
        self, conversation: Conversation, tokens: int, read: Read
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """The decoded media by kind, and vLLM's options for them. Pictures are scaled before the next is decoded.

        Args:
            tokens: of the text, each medium with one.
        """
        tracks = self._refuse_large(conversation, tokens, read)
        spent, sampler = Spent(self._settings), partial(self.sample_frames, choice=conversation.frames)
        settings, rate = self._settings, self._checkpoint.sample_rate_hz
        media: dict[str, list[Any]] = {"image": [], "audio": [], "video": []}
        silent: list[MediaFile] = []
        for file in conversation.media:
            if file.kind == "image":
                media["image"].append(self._scaler.image(decode_image(file, settings, read)))
            elif file.kind == "audio":
                media["audio"].append(self._long_enough(file, decode_audio(file, rate, settings, spent, read)))
            else:
                track = tracks[len(media["video"])]
                of_frames = sampler, settings, spent, read, self._scaler.frame, track
                video = decode_video(file, rate, *of_frames)
                media["video"].append((video.frames, _metadata(track)))
                if conversation.use_audio_in_video and video.sound is not None:
                    media["audio"].append(self._long_enough(file, video.sound))
                else:
                    silent.append(file)
        options: dict[str, Any] = {}
        if media["video"]:
            options |= self._checkpoint.video_options(self._fps(conversation, tracks))
            if conversation.use_audio_in_video and len(silent) < len(media["video"]):
                if silent:
                    raise InvalidInput(silent[0].field, f"has no sound track, but another video has one: {_NO_MIX}")
                if len(media["audio"]) > len(media["video"]):
                    raise InvalidInput("use_audio_in_video", f"must not be set beside audio parts: {_NO_MIX}")
                options["use_audio_in_video"] = True
        media["audio"] = [(wave, rate) for wave in media["audio"]]
        return {kind: items for kind, items in media.items() if items}, options

    def _refuse_large(self, conversation: Conversation, tokens: int, read: Read) -> list[VideoTrack]:
        """The videos'. Raises InvalidInput: by the headers, media cost more than is allowed, or fill the context."""
        if conversation.use_audio_in_video and not self._checkpoint.hears_videos:
            raise InvalidInput("use_audio_in_video", "this model does not hear the sound of a video; leave it out")
        tracks, sampler = list[VideoTrack](), partial(self.sample_frames, choice=conversation.frames)
        spent, settings, scaler = Spent(self._settings), self._settings, self._scaler
        for file in conversation.media:
            if file.kind == "image":
                tokens += scaler.image_tokens(*image_size(file, settings, spent, read)) - 1
            elif file.kind == "audio":
                tokens += scaler.least_sound_tokens(sound_length(file, settings, spent, read)) - 1
            else:
                tracks.append(track := video_track(file, sampler, settings, spent, read))
                tokens += scaler.video_tokens(len(track.wanted), *track.size) - 1
            refuse_longer(tokens, self._engine.max_context_tokens, conversation.field, is_whole=False)
        self._fps(conversation, tracks)
        return tracks

    def _fps(self, conversation: Conversation, tracks: list[VideoTrack]) -> float:
        """See `frames.rate_of`. vLLM has rope positions for four contexts."""
        per_s = self._checkpoint.positions_per_s
        most_s = self._engine.max_context_tokens / per_s if per_s else math.inf
        return frames.rate_of(tracks, self._settings.video_fps, conversation.frames, most_s)

    def sample_frames(self, total: int, rate: float, choice: FrameChoice | None = None) -> np.ndarray:
        """See `frames.sample`."""
        return frames.sample(self._checkpoint.processor.video_processor, total, rate, self._settings.video_fps, choice)

    def _long_enough(self, file: MediaFile, samples: np.ndarray) -> np.ndarray:
        window = self._checkpoint.sound_window
        if len(samples) <= window:
            least_ms = 1000 * window / self._checkpoint.sample_rate_hz
            raise InvalidMedia(file.field, f"its sound must last longer than {least_ms:g} ms")
        return samples

    def _fitting(self, prompt: Prompt, field: str) -> Prompt:
        refuse_longer(len(prompt.token_ids), self._engine.max_context_tokens, field)
        return prompt

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


def _metadata(track: VideoTrack) -> dict[str, Any]:
    """What processors that write the times of frames want to know. The frames are chosen already."""
    return {
        "total_num_frames": track.frames,
        "fps": track.rate,
        "duration": track.frames / track.rate,
        "frames_indices": track.wanted.tolist(),
        "video_backend": "quartet",
        "do_sample_frames": False,
    }
