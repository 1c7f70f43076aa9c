"""Facts of the checkpoint that the thinker needs outside vLLM."""

from dataclasses import dataclass
from typing import Any, Self

from services.common.telemetry import logs

_FILES = ("*.json", "*.txt", "*.jinja")  # configurations, tokenizer, chat template


@dataclass(frozen=True)
class Checkpoint:
    """What config.json, the tokenizer and the processor say.

    Attributes:
        folder: where the files are; vLLM is given it, and so asks the hub for nothing.
        dtype: that the weights are stored in, e.g. "bfloat16"; None where config.json does not say.
        hidden_size: elements of a hidden state.
        vocab_size: token ids are below it.
        accept_hidden_layer: layer whose states the talker reads.
        audio_token_id, image_token_id, video_token_id: placeholders in a prompt.
        audio_chunk_frames: spectrogram frames that the audio encoder takes at a time.
        sample_rate_hz: of the audio that the feature extractor takes.
        processor: transformers' Qwen3OmniMoeProcessor: chat template, tokenizer, media processors.
    """

    folder: str
    dtype: str | None
    hidden_size: int
    vocab_size: int
    accept_hidden_layer: int
    audio_token_id: int
    image_token_id: int
    video_token_id: int
    audio_chunk_frames: int
    sample_rate_hz: int
    processor: Any

    @classmethod
    def load(cls, model: str) -> Self:
        """Reads the checkpoint directory or hub id `model`.

        Raises:
            ValueError: no such checkpoint, or not a Qwen3-Omni one.
            OSError: files are missing.
        """
        from transformers import AutoConfig, AutoProcessor

        from services.common.engine.weights import local_folder

        logs.adopt("transformers")
        # All weights: vLLM refuses a directory that lacks a file which its index names.
        folder = str(local_folder(model, lambda name: True, _FILES))
        config = AutoConfig.from_pretrained(folder)
        if config.model_type != "qwen3_omni_moe":
            raise ValueError(f"{model} is a {config.model_type} checkpoint; the thinker serves qwen3_omni_moe")
        processor = AutoProcessor.from_pretrained(folder)
        thinker = config.thinker_config
        dtype = config.dtype or thinker.dtype or thinker.text_config.dtype
        return cls(
            folder=folder,
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            hidden_size=thinker.text_config.hidden_size,
            vocab_size=thinker.text_config.vocab_size,
            accept_hidden_layer=config.talker_config.accept_hidden_layer,
            audio_token_id=thinker.audio_token_id,
            image_token_id=thinker.image_token_id,
            video_token_id=thinker.video_token_id,
            audio_chunk_frames=2 * thinker.audio_config.n_window,
            sample_rate_hz=processor.feature_extractor.sampling_rate,
            processor=processor,
        )

    def hidden_layers(self, keep_embeddings: bool) -> tuple[int, ...]:
        """Layers whose states are kept: the talker's, and 0, the embeddings after the media were merged in, if asked
        for."""
        return tuple(sorted({self.accept_hidden_layer} | ({0} if keep_embeddings else set())))

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return self.processor.tokenizer

    def token_id(self, token: str) -> int | None:
        """Id of `token` if the vocabulary has it as one."""
        return self.tokenizer.get_vocab().get(token)
