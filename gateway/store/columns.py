"""Columns that tables of several stores have, and what fits in one."""

from sqlalchemy import BigInteger, Integer

# Order of creation: a second can have several rows. SQLite counts its own INTEGER PRIMARY KEY only.
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
_NUL = "\0"


def fits(text: str) -> bool:
    """Whether a column of text can have it: PostgreSQL's have no NUL."""
    return _NUL not in text
