"""The stage that reads prompts for a diffusion stage without encoders."""
