"""deploy/ without Kubernetes: compose files, the images' health command, the monitoring."""
