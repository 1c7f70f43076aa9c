"""Gateways that reach each other."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "neighbours_1", None


def upgrade() -> None:
    # Each gateway says again every few seconds what stands there: no write waits for a disk.
    unlogged = ["UNLOGGED"] if op.get_bind().dialect.name == "postgresql" else []
    op.create_table(
        "neighbours",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("there_until", sa.Double, nullable=False),
        prefixes=unlogged,
    )
