"""An unfinished video belongs to a gateway, for as long as that renews its lease."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "videos_4", "videos_3"


def upgrade() -> None:
    op.add_column("videos", sa.Column("holder", sa.Text))
    op.add_column("videos", sa.Column("held_until", sa.Double))
    op.create_index("videos_by_holder", "videos", ["holder"])
