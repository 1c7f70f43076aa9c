"""What the diffusion stage and its encoder share: diffusers' checkpoints, and requests made into calls of pipelines."""
