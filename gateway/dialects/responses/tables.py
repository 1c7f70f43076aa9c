"""Tables of responses and conversations. A change needs a revision in gateway/store/migrations/versions/responses."""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text, false

from gateway.store.columns import SEQUENCE

tables = MetaData()

# A thread is a response or a conversation. One that is in the making has a lease.
threads = Table(
    "threads",
    tables,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),  # name of an API key; "": there were no keys
    Column("created_at", BigInteger, nullable=False),  # Unix seconds
    Column("used_at", Double, nullable=False),  # Unix seconds of the last creation, change or answer
    Column("bytes", BigInteger, nullable=False),  # with its items
    Column("previous", Text),  # id of the response before
    Column("body", Text, nullable=False),  # JSON: the response's object, or the conversation's metadata
    Column("holder", Text),  # name of the gateway that makes it; NULL: it has ended
    Column("held_until", Double),  # Unix seconds by the database's clock
    Column("cancels", Boolean, nullable=False, server_default=false()),  # its holder is to cancel it
    Index("threads_by_use", "used_at"),
    Index("threads_by_holder", "holder"),
)

items = Table(
    "items",
    tables,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False),
    Column("thread", Text, ForeignKey("threads.id", ondelete="CASCADE"), nullable=False),
    Column("is_output", Integer, nullable=False),  # 0 or 1
    Column("body", Text, nullable=False),  # JSON
    Index("items_by_thread", "thread"),
    Index("items_by_id", "id"),
    sqlite_autoincrement=True,
)

# Events of a response in the background, which any gateway can tell.
events = Table(
    "events",
    tables,
    Column("thread", Text, ForeignKey("threads.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # its sequence_number
    Column("body", Text, nullable=False),  # JSON
)
