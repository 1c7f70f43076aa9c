"""The table of uploaded voices. A change needs a revision in gateway/store/migrations/versions/voices."""

from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, MetaData, Table, Text

from gateway.store.columns import SEQUENCE
from gateway.store.row_blobs import spaces_table

tables = MetaData()

voices = Table(
    "voices",
    tables,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("consent", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("owner", Text),  # name of an API key; NULL: there were no keys
    Column("sample", LargeBinary, nullable=False),  # a FLAC file; empty: it is a blob
    Column("folded_name", Text, nullable=False, server_default=""),  # without its case
    Index("voices_by_name", "folded_name"),
    sqlite_autoincrement=True,
)

spaces = spaces_table("voice_spaces", tables)
