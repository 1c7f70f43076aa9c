"""A video is made from another one. This is what 0.2.0 has."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "videos_3", "videos_2"


def upgrade() -> None:
    op.add_column("videos", sa.Column("remixed_from", sa.Text))
