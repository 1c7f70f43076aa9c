"""The folder of blobs that is this database's."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "videos_5", "videos_4"


def upgrade() -> None:
    op.create_table("video_spaces", sa.Column("name", sa.Text, primary_key=True))
