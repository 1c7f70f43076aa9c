"""Users: their browsers and programs, what they ask a gateway for and how they check its answers."""
