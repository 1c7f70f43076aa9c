"""Uploaded files, and the folder of blobs that is this database's."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "files_1", None

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("files_by_owner", "files", ["owner"])
    op.create_index("files_by_end", "files", ["expires_at"])
    op.create_table("file_spaces", sa.Column("name", sa.Text, primary_key=True))
