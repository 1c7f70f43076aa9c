"""Names as people write them."""

from collections.abc import Iterable


def match_case(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is `name` in upper or lower case; None: there is none."""
    return next((each for each in known if each.lower() == name.lower()), None)
