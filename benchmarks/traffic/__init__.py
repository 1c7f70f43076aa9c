"""Load on a gateway: who asks, when, and what the answers say."""
