"""A video belongs to an API key."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "videos_2", "videos_1"


def upgrade() -> None:
    op.add_column("videos", sa.Column("owner", sa.Text))
