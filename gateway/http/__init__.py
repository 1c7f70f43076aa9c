"""The wire: connections, forms, JSON, middleware and worker processes. It knows no model."""
