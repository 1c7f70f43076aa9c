"""Who may ask for what: API keys, client secrets, and the state that the processes of a gateway share."""
