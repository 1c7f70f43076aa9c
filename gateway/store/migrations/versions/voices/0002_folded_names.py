"""Names are compared without their case by a column of their own, alike in every database."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "voices_2", "voices_1"

_voices = sa.table("voices", sa.column("sequence"), sa.column("name"), sa.column("folded_name"))


def upgrade() -> None:
    op.add_column("voices", sa.Column("folded_name", sa.Text, nullable=False, server_default=""))
    connection = op.get_bind()
    for sequence, name in connection.execute(sa.select(_voices.c.sequence, _voices.c.name)).all():
        folded = sa.update(_voices).where(_voices.c.sequence == sequence).values(folded_name=name.casefold())
        connection.execute(folded)
    op.create_index("voices_by_name", "voices", ["folded_name"])
