"""What Alembic runs: the revisions of one store, in the transaction of a given connection."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
    transactional_ddl=True,
)
context.run_migrations()
