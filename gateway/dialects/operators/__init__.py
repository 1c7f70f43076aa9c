"""Endpoints for operators: profiles and gauges."""
