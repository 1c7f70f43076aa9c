"""Parts of statements that several stores have."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, true


def owned_by(owner: str | None, column: ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether rows are `owner`'s, whose name is in `column`; None owns all."""
    return true() if owner is None else column == owner


def rows_behind(
    connection: Connection,
    found: Select[Any],
    sequence: ColumnElement[int],
    after: ColumnElement[bool] | None,
    limit: int,
    newest_first: bool,
    only: ColumnElement[bool] | None = None,
) -> Sequence[Row[Any]] | None:
    """At most `limit` rows of `found`, in the order of `sequence`.

    Args:
        after: which row they come behind; None: none.
        only: which rows they are; the one before them need not be one.

    Returns:
        None: there is no row `after`.
    """
    beyond: ColumnElement[bool] = true()
    if after is not None:
        at = connection.execute(found.with_only_columns(sequence).where(after).limit(1)).scalar()
        if at is None:
            return None
        beyond = sequence < at if newest_first else sequence > at
    these = found.where(beyond, true() if only is None else only)
    ordered = these.order_by(sequence.desc() if newest_first else sequence.asc())
    return connection.execute(ordered.limit(limit)).all()
