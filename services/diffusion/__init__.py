"""What the diffusion stage (`services.dit`) and its encoder (`services.encoder`) share: checkpoints of diffusers, what
their pipelines take, and requests made into calls of them."""
