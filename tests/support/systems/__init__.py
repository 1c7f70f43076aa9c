"""Systems of several processes or stages, and a look inside."""
