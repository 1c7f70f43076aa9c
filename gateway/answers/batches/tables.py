"""Tables of batches. A change needs a revision in gateway/store/migrations/versions/batches."""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text, false

from gateway.store.columns import SEQUENCE

tables = MetaData()

batches = Table(
    "batches",
    tables,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),  # name of an API key; "": there were no keys
    Column("models", Text, nullable=False),  # JSON: names of what the gateway served where it was made
    Column("status", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False),  # Unix seconds: what has not begun then is not done
    Column("body", Text, nullable=False),  # JSON: OpenAI's Batch object, without its counts while it is worked on
    Column("cancels", Boolean, nullable=False, server_default=false()),
    Column("holder", Text),  # name of the gateway that works on it; NULL: nobody does
    Column("held_until", Double),  # Unix seconds by the database's clock
    Index("batches_by_owner", "owner"),
    Index("batches_by_status", "status"),
    sqlite_autoincrement=True,
)

# What a line came to, until all are in files.
lines = Table(
    "batch_lines",
    tables,
    Column("batch", Text, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # of the line, from 0
    Column("is_error", Boolean, nullable=False),
    Column("body", Text, nullable=False),  # JSON: a line of the output file, or of the error file
)
