"""The overlays of deploy/k8s: how they are rendered, and what their objects must be to each other."""
