"""Any model that vLLM runs, as its configuration, tokenizer and chat template say. It keeps no rows for a talker."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.families.any_model import marks, media
from services.families.any_model.sections import AROUND, text_sections
from services.sizes import weights_dtype
from services.thinker.architectures import keeps_state, only_transcribes, transcribes
from services.thinker.family import ThinkerCheckpoint, chat_template
from services.thinker.plugin.rows import RowKind

ARCHITECTURES: dict[str, str] = {}


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
    tokenizer = getattr(processor, "tokenizer", processor)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder}: its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json, which is needed")
    template, architecture = chat_template(processor), config["architectures"][0]
    placeholders, spelled = media.placeholders(architecture, whole, processor)
    if writes_down := only_transcribes(architecture):  # the sound is not in its prompt, which begins with this token
        placeholders["audio"] = getattr(whole, "decoder_start_token_id", None) or 0
    return AnyCheckpoint(
        folder=folder,
        dtype=weights_dtype(*text_sections(config)),
        vocab_size=max(getattr(text, "vocab_size", 0), len(tokenizer)),
        hidden_size=getattr(text, "hidden_size", 0),
        accept_hidden_layer=None,
        placeholders=placeholders,
        spelled=spelled,
        tool_calls=marks.tool_markers(template),
        tool_parser=marks.tool_parser(template),
        reasoning=marks.reasoning_markers(template, tokenizer),
        keeps_state=keeps_state(architecture),
        transcribes=transcribes(architecture),
        only_transcribes=writes_down,
        processor=processor,
    )


def _config(folder: Path) -> Any:
    """transformers', which has the defaults that config.json leaves out; vLLM's, if transformers has none, or one for
    a file of another form."""
    from transformers import AutoConfig

    configs: Any = AutoConfig
    with suppress(ValueError):
        found = configs.from_pretrained(folder, trust_remote_code=False)
        # what its class does not know it leaves as it is
        if not any(isinstance(getattr(found, name, None), dict) for name in AROUND):
            return found
    from vllm.transformers_utils import config

    more: Any = config
    return more.get_config(folder, trust_remote_code=False)
