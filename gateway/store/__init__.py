"""What gateways keep: in SQLite for one machine, in PostgreSQL for many gateways."""
