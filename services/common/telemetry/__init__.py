"""What a process tells about itself: logs, metrics, traces, and the port that they and health are read from."""
