"""The sections of a config.json that are about the model of text."""

from collections.abc import Mapping, Sequence
from typing import Any

AROUND = ("thinker_config",)
"""Sections that have those of text and media, where these are not at the top."""
_TEXT = ("text_config", "llm_config", "language_config")


def text_sections(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """From the outermost, which is all of it, to the one with the sizes of the model of text."""
    sections = [config]
    for names in (AROUND, _TEXT):
        sections += [inner for name in names if isinstance(inner := sections[-1].get(name), dict)][:1]
    return sections
