"""Names as people write them, and messages for people."""

import re
from collections.abc import Iterable

ROLE_NAME = r"[\w.-]{1,64}"
"""Pattern of a role of one's own. Chat templates write it as it is, so it must not have control tokens."""
_MAX_CHARACTERS = 1000
# What messages of libraries have for their own developers: places in a source, objects, and numbers of errors.
_INSIDES = re.compile(
    r"\[\d\d:\d\d:\d\d\] |(?<!\S)\S*/\S+\.(?:cc|cpp|cu|h|py|pyx|rs)(?::\d+)+:? ?|File \"\S+\", line \d+"
    r"|\[Errno -?\d+\] ?|,? patches welcome|: '<none>'"
    r"|<[\w.]+ (?:[^<>]* )?at 0x[0-9a-fA-F]+>|'[\w.]+' object has no attribute '\w+'"
)


def match_case(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is `name` in upper or lower case; None: there is none."""
    return next((each for each in known if each.lower() == name.lower()), None)


def without_insides(message: str) -> str:
    """`message` without what a library says of itself. A long one is cut: it may quote a client, and patterns take a
    power of its length."""
    short = message if len(message) <= _MAX_CHARACTERS else f"{message[:_MAX_CHARACTERS]}..."
    return re.sub(r"\s+", " ", _INSIDES.sub("", short)).strip(" :,")
