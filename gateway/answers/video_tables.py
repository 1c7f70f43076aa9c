"""The table of video jobs. A change needs a revision in gateway/store/migrations/versions/videos."""

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Table, Text

from gateway.store.columns import SEQUENCE
from gateway.store.row_blobs import spaces_table

tables = MetaData()

videos = Table(
    "videos",
    tables,
    Column("sequence", SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("progress", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger),
    Column("expires_at", Double),
    Column("width", BigInteger, nullable=False),
    Column("height", BigInteger, nullable=False),
    Column("frames", BigInteger, nullable=False),
    Column("frames_per_second", Double, nullable=False),
    Column("seed", Text),  # up to 2^64 - 1, more than a database's integers
    Column("error_code", Text),
    Column("error_message", Text),
    Column("owner", Text),  # name of an API key; NULL: there were no keys
    Column("remixed_from", Text),
    Column("holder", Text),  # name of the gateway that makes it; NULL: it has ended
    Column("held_until", Double),  # Unix seconds by the database's clock
    Index("videos_by_end", "expires_at"),
    Index("videos_by_holder", "holder"),
    sqlite_autoincrement=True,
)

spaces = spaces_table("video_spaces", tables)
