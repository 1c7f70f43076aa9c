"""The folder of blobs that is this database's. A sample that is a blob is empty in its row."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "voices_3", "voices_2"


def upgrade() -> None:
    op.create_table("voice_spaces", sa.Column("name", sa.Text, primary_key=True))
