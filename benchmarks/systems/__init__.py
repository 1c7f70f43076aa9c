"""What is measured: stages and gateways, and what their processes use and hold."""
