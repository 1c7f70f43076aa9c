"""Responses and conversations, as 0.2.0 has them."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "responses_1", None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "threads",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("previous", sa.Text),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("threads_by_use", "threads", ["used_at"])
    op.create_table(
        "items",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("thread", sa.Text, sa.ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
        sa.Column("is_output", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("items_by_thread", "items", ["thread"])
    op.create_index("items_by_id", "items", ["id"])
