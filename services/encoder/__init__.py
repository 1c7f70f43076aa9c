"""The stage that reads prompts for a dit without encoders of its own."""
