"""HTTP: connections, forms, JSON, middleware and worker processes."""
