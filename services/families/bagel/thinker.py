"""BAGEL's thinker: it reads texts and pictures, and answers in text."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.families.bagel.files import END, LLM, MARKS, START, read
from services.families.bagel.thinker_config import ARCHITECTURE, PICTURE, as_published
from services.sizes import weights_dtype
from services.thinker.family import ThinkerCheckpoint
from services.thinker.plugin.rows import RowKind

ARCHITECTURES = {ARCHITECTURE: "services.families.bagel.thinker_model:BagelThinker"}
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True)
class BagelThinkerCheckpoint(ThinkerCheckpoint):
    """A checkpoint in the published format."""

    def row_kinds(self) -> tuple[RowKind, ...]:
        return ()  # no talker reads them

    def engine_args(self, on_cpu: bool) -> dict[str, Any]:
        return {"hf_overrides": partial(as_published, self.folder, tuple(self.tokenizer.convert_tokens_to_ids(MARKS)))}

    @property
    def splits_media(self) -> bool:
        return False  # the tokens of a picture see each other


def checkpoint(folder: Path, config: dict[str, Any], processor: Any) -> BagelThinkerCheckpoint:
    """See `services.thinker.family.ThinkerFamily`. The published chat template has roles, which the model was not
    trained with: this family has its own."""
    from transformers import Qwen2Tokenizer

    llm = read(folder, LLM)
    tokenizers: Any = Qwen2Tokenizer
    tokenizer = tokenizers.from_pretrained(folder)
    if missing := [token for token in (START, END, PICTURE, *MARKS) if token not in tokenizer.get_vocab()]:
        raise ValueError(f"{folder}: its tokenizer has no {missing[0]}")
    tokenizer.chat_template = _TEMPLATE.read_text()
    return BagelThinkerCheckpoint(
        folder=folder,
        dtype=weights_dtype(config, llm),
        vocab_size=llm["vocab_size"],
        hidden_size=llm["hidden_size"],
        accept_hidden_layer=None,
        placeholders={"image": tokenizer.convert_tokens_to_ids(PICTURE)},
        tool_calls=None,
        processor=tokenizer,
    )
