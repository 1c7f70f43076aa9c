"""One stage's engine alone, at real sizes."""
