"""What gateways use of the limits of API keys."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "usage_1", None


def upgrade() -> None:
    # Nothing of it outlives a crash of the database: no write waits for a disk.
    unlogged = ["UNLOGGED"] if op.get_bind().dialect.name == "postgresql" else []
    op.create_table(
        "usage_gateways",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("seen_at", sa.Double, nullable=False),
        prefixes=unlogged,
    )
    op.create_table(
        "usage",
        sa.Column("gateway", sa.Text, sa.ForeignKey("usage_gateways.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("key_name", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("running", sa.Integer, nullable=False),
        sa.Column("sessions", sa.Integer, nullable=False),
        sa.Column("as_of", sa.Double, nullable=False),
        sa.Column("admitted", sa.Text, nullable=False),
        prefixes=unlogged,
    )
