"""The table of gateways that reach each other. A change needs a revision in
gateway/store/migrations/versions/neighbours."""

from sqlalchemy import Column, Double, MetaData, Table, Text

tables = MetaData()

neighbours = Table(
    "neighbours",
    tables,
    Column("name", Text, primary_key=True),  # as in ids of what it holds
    Column("url", Text, nullable=False),  # at which other gateways reach it
    Column("there_until", Double, nullable=False),  # Unix seconds of the database's clock: the end of its lease
)
