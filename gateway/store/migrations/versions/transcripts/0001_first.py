"""What spoken answers said, by audio id."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "transcripts_1", None


def upgrade() -> None:
    op.create_table(
        "transcripts",
        sa.Column("audio_id", sa.Text, primary_key=True),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("transcript", sa.Text, nullable=False),
    )
    op.create_index("transcripts_by_end", "transcripts", ["expires_at"])
