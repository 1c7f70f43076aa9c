"""Columns that tables of several stores have."""

from sqlalchemy import BigInteger, Integer

# Order of creation: a second can have several rows. SQLite counts its own INTEGER PRIMARY KEY only.
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
