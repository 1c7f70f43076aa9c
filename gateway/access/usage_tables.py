"""Tables of what gateways use of keys' limits. A change needs a revision in gateway/store/migrations/versions/usage."""

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, MetaData, Table, Text

tables = MetaData()

gateways = Table(
    "usage_gateways",
    tables,
    Column("name", Text, primary_key=True),
    Column("seen_at", Double, nullable=False),  # Unix seconds of its last report, by the database's clock
)

usage = Table(
    "usage",
    tables,
    Column("gateway", Text, ForeignKey("usage_gateways.name", ondelete="CASCADE"), primary_key=True),
    Column("key_name", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),  # another one with each change
    Column("running", Integer, nullable=False),  # requests
    Column("sessions", Integer, nullable=False),  # that are open
    Column("as_of", Double, nullable=False),  # Unix seconds by the database's clock, of age 0
    Column(
        "admitted", Text, nullable=False
    ),  # JSON: [[age in whole seconds, requests], ...]; ages to come are negative
)
