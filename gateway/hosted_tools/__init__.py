"""Tools that the gateway runs itself when the model calls them, in responses and in chats."""
