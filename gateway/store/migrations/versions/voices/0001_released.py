"""Uploaded voices, as 0.2.0 has them."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "voices_1", None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_NAME = sa.Text().with_variant(sa.Text(collation="NOCASE"), "sqlite")


def upgrade() -> None:
    op.create_table(
        "voices",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("consent", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("sample", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
