"""Spoken conversations: users, microphones, and how soon they are answered."""
