"""Grammars that compile, but that have a dead end: a schema, or a part of one, that always needs itself again."""

import json
import re
from collections.abc import Mapping, Sequence

from services.thinker.schemas import Schema

_PLACE = re.compile(r"^.*?\[\d\d:\d\d:\d\d\] \S+:\d+: ", re.DOTALL)  # in XGrammar's source


def reason(error: Exception) -> str:
    """Why a grammar is refused: the first cause, without places in the compiler's source."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return _PLACE.sub("", str(cause)).strip() or str(error)


def check_allows_text(kind: str, text: str) -> None:
    """Raises ValueError: a grammar compiles, but no text that ends fits it, or a part that may be begun.

    Args:
        kind: "json", for a schema, "lark", or another of vLLM's names.
    """
    from xgrammar import Grammar

    grammars: list[Grammar] = []
    if kind == "json":
        grammars = [Grammar.from_json_schema(text)]
    elif kind in ("lark", "grammar"):
        grammars = [Grammar.from_lark(text) if kind == "lark" else Grammar.from_ebnf(text)]
    elif kind == "structural_tag":
        tag = json.loads(text)
        if "structures" in tag:  # XGrammar's older form
            grammars = [Grammar.from_json_schema(json.dumps(each["schema"])) for each in tag["structures"]]
        else:
            formats = tag["format"].get("elements", [tag["format"]])
            grammars = [Grammar.from_structural_tag(json.dumps(tag | {"format": each})) for each in formats]
    for grammar in grammars:
        _check_ends(str(grammar))


def find_fault(schemas: Mapping[str, Schema]) -> tuple[str, str] | None:
    """(field, why it is refused) of the first schema that is refused by itself; None: there is none.

    Args:
        schemas: parts of a grammar, each `standalone`, by the fields that they come from.
    """
    for field, schema in schemas.items():
        try:
            check_allows_text("json", json.dumps(schema))
        except Exception as error:  # XGrammar raises what it likes
            return field, reason(error)
    return None


def _check_ends(ebnf: str) -> None:
    """Raises ValueError: texts of a grammar, as XGrammar prints it, may come to where they cannot end."""
    if not _ends(ebnf):
        raise ValueError("no text that ends fits it, or a part of it: that always needs itself again")


_STRING = r'"(?:\\.|[^"\\])*"'
# The second kind is what XGrammar prints as Regex("...", ...).
_TOKEN = re.compile(
    rf'{_STRING}|\w+\((?:{_STRING}|[^")])*\)|\[(?:\\.|[^\]\\])*\]'
    r"|\{\s*(\d+)[^}]*\}|([A-Za-z_][\w.]*)|::=|[()|*+?=]"
)

Ways = set[frozenset[str]]
"""Sets of rules of a grammar. A text ends if all rules of one of them do."""
_FREE: Ways = {frozenset()}
_MOST_WAYS = 1000  # more are not looked at: then a text is taken to end


def _ends(ebnf: str) -> bool:
    """Whether all rules of a grammar, as XGrammar prints it, have texts that end."""
    rules = dict(line.split(" ::= ", 1) for line in ebnf.splitlines() if " ::= " in line)
    needed = {name: _alternatives(body) for name, body in rules.items()}
    ending: set[str] = set()
    before = -1
    while before < len(ending):
        before = len(ending)
        for name, ways in reversed(needed.items()):  # rules mostly need later ones
            if any(way <= ending for way in ways):
                ending.add(name)
    left, reached = ["root"], {"root"}
    while left:
        names = {token[2] for token in _TOKEN.finditer(rules[left.pop()])} & rules.keys()
        left += names - reached
        reached |= names
    return reached <= ending


def _alternatives(body: str) -> Ways:
    tokens = [token for token in _TOKEN.finditer(body)]  # noqa: C416  `list` would keep all other threads waiting
    ways, _ = _choice(tokens, 0)
    return ways


def _choice(tokens: Sequence[re.Match[str]], at: int) -> tuple[Ways, int]:
    """The ways of the alternatives from token `at` on; and where they end."""
    ways: Ways = set()
    current, before_last = _FREE, _FREE
    while at < len(tokens) and tokens[at][0] != ")":
        token, least, name = tokens[at].group(0, 1, 2)
        at += 1
        if token == "|":
            ways, current = ways | current, _FREE
        elif least is not None or token in ("*", "+", "?"):
            if least == "0" or token in ("*", "?"):  # what stands before it may be absent
                current = before_last
        else:
            inner = {frozenset({name})} if name else _FREE
            if token == "(":
                inner, at = _choice(tokens, at)
                at += 1
            before_last, current = current, {one | other for one in current for other in inner}
            if len(current) > _MOST_WAYS:
                current = _FREE
    return ways | current, at
