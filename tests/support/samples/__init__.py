"""What tests send: sound, pictures, films, conversations and questions."""
