"""Any model that vLLM runs, as its configuration, tokenizer and chat template say. It keeps no rows for a talker."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.families.any_model import marks, media
from services.sizes import weights_dtype
from services.thinker.architectures import keeps_state, transcribes
from services.thinker.family import ThinkerCheckpoint, chat_template
from services.thinker.plugin.rows import RowKind

ARCHITECTURES: dict[str, str] = {}
_TEXT = ("text_config", "llm_config", "language_config")  # parts of config.json


@dataclass(frozen=True)
class AnyCheckpoint(ThinkerCheckpoint):
    """A checkpoint of which nothing is known but what its files say."""

    def row_kinds(self) -> tuple[RowKind, ...]:
        return ()

    @property
    def splits_media(self) -> bool:
        return not self.placeholders  # the embeddings of a picture may see each other

    @property
    def hears_videos(self) -> bool:
        return False

    def video_options(self, fps: float) -> dict[str, Any]:
        return {}  # the frames come with their times


def checkpoint(folder: Path, config: dict[str, Any], processor: Any) -> AnyCheckpoint:
    """See `services.thinker.family.ThinkerFamily`."""
    whole = _config(folder)
    text = whole.get_text_config()
    parts: list[dict[str, Any]] = [config[name] for name in _TEXT if isinstance(config.get(name), dict)]
    tokenizer = getattr(processor, "tokenizer", processor)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder}: its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json, which is needed")
    template, architecture = chat_template(processor), config["architectures"][0]
    placeholders, spelled = media.placeholders(architecture, whole, processor)
    if hears := transcribes(architecture):  # the sound is no part of its prompt, which begins with this token
        placeholders["audio"] = getattr(whole, "decoder_start_token_id", None) or 0
    return AnyCheckpoint(
        folder=folder,
        dtype=weights_dtype(config, *parts),
        vocab_size=max(getattr(text, "vocab_size", 0), len(tokenizer)),
        hidden_size=getattr(text, "hidden_size", 0),
        accept_hidden_layer=None,
        placeholders=placeholders,
        spelled=spelled,
        tool_calls=marks.tool_markers(template),
        tool_parser=marks.tool_parser(template),
        reasoning=marks.reasoning_markers(template, tokenizer),
        keeps_state=keeps_state(architecture),
        transcribes=hears,
        processor=processor,
    )


def _config(folder: Path) -> Any:
    """transformers', which has the defaults that config.json leaves out; vLLM's, if transformers has none."""
    from transformers import AutoConfig

    configs: Any = AutoConfig
    try:
        return configs.from_pretrained(folder, trust_remote_code=False)
    except ValueError:
        from vllm.transformers_utils import config

        more: Any = config
        return more.get_config(folder, trust_remote_code=False)
