"""What `quartet talk` is made of."""
