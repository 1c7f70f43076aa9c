"""Other gateways of the database, and what they hold: calls and Live sessions are found from any of them."""
