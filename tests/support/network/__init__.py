"""What lies between processes: hosts, wires and TLS."""
