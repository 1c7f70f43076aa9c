"""What measures Quartet. Each command is a module: `python -m benchmarks.speech --help`."""
