"""Who may use the API, and how much of it: keys, their limits, and what happens to requests without one."""
