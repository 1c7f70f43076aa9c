"""Stages that follow a script: real gRPC servers with the real services, but no model behind them."""
