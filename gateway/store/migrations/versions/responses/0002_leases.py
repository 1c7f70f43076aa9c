"""A response in the making belongs to a gateway; its events are kept for other gateways."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "responses_2", "responses_1"


def upgrade() -> None:
    op.add_column("threads", sa.Column("holder", sa.Text))
    op.add_column("threads", sa.Column("held_until", sa.Double))
    op.add_column("threads", sa.Column("cancels", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("threads_by_holder", "threads", ["holder"])
    op.create_table(
        "events",
        sa.Column("thread", sa.Text, sa.ForeignKey("threads.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
