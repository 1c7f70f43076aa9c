"""Batches, and what their lines came to."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "batches_1", None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("cancels", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("holder", sa.Text),
        sa.Column("held_until", sa.Double),
        sqlite_autoincrement=True,
    )
    op.create_index("batches_by_owner", "batches", ["owner"])
    op.create_index("batches_by_status", "batches", ["status"])
    op.create_table(
        "batch_lines",
        sa.Column("batch", sa.Text, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("is_error", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
