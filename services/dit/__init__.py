"""The stage that makes pictures, videos and sound: diffusers' pipelines, served."""
