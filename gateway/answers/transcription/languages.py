"""ISO 639-1 codes and English names of languages."""

from pathlib import Path

import yaml

_LANGUAGES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def language_of(named: str) -> str:
    """English name of a language, named so or by its code, with or without a region. Raises ValueError."""
    code = named.replace("_", "-").partition("-")[0].strip().lower()
    for known, name in _LANGUAGES.items():
        if code == known or named.strip().lower() == name.lower():
            return name
    raise ValueError(f"no language {named!r}; use an ISO 639-1 code such as en, de or zh")


def code_of(language: str | None) -> str:
    """ISO 639-1 code of a language by its English name; "" for none."""
    return next((code for code, name in _LANGUAGES.items() if name == language), "")


def every_code() -> tuple[str, ...]:
    """ISO 639-1 codes of all languages that are known here."""
    return tuple(_LANGUAGES)
