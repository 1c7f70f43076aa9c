"""Classes of a model that makes pictures of a class instead of a prompt."""

import difflib
from typing import Any

from services.common.errors import InvalidInput


def label_of(pipeline: Any, prompt: str, classes: int) -> int:
    """The number of the class that `prompt` names, by its number or, if the checkpoint has names, by one of them.

    Raises:
        InvalidInput: there is none.
    """
    name = prompt.strip()
    if name.isdecimal() and len(name) <= len(str(classes)) and int(name) < classes:
        return int(name)
    names = {known.casefold(): number for known, number in (getattr(pipeline, "labels", None) or {}).items()}
    number = names.get(name.casefold())
    if number is not None and 0 <= number < classes:
        return number
    like = difflib.get_close_matches(name.casefold(), names, 3)
    reason = f"must be the number of a class, 0 to {classes - 1}"
    reason += f", or its name, such as {', '.join(like or list(names)[:3])}" if names else ""
    raise InvalidInput("prompt", reason)
