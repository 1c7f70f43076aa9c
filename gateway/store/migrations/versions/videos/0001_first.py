"""Jobs of videos, as they were at first."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "videos_1", None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "videos",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("progress", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("expires_at", sa.Double),
        sa.Column("width", sa.BigInteger, nullable=False),
        sa.Column("height", sa.BigInteger, nullable=False),
        sa.Column("frames", sa.BigInteger, nullable=False),
        sa.Column("frames_per_second", sa.Double, nullable=False),
        sa.Column("seed", sa.Text),
        sa.Column("error_code", sa.Text),
        sa.Column("error_message", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("videos_by_end", "videos", ["expires_at"])
