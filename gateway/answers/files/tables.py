"""Tables of uploaded files. A change needs a revision in gateway/store/migrations/versions/files."""

from sqlalchemy import BigInteger, Column, Double, Index, MetaData, Table, Text

from gateway.store.columns import SEQUENCE
from gateway.store.row_blobs import spaces_table

tables = MetaData()

files = Table(
    "files",
    tables,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),  # name of an API key; "": there were no keys
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),  # the client's
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),  # Unix seconds
    Column("expires_at", Double, nullable=False),  # Unix seconds
    Index("files_by_owner", "owner"),
    Index("files_by_end", "expires_at"),
    sqlite_autoincrement=True,
)

spaces = spaces_table("file_spaces", tables)
