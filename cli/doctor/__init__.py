"""`quartet doctor`: what this machine is, which paths the stages take on it, and what will not start."""
