"""The endpoints of a gateway."""

from typing import Any

import fastapi.routing


def endpoints(app: Any) -> set[tuple[str, str]]:
    """(method, path) of all that the gateway defines, without HEAD and its description; paths with their
    parameters in braces."""
    own = {"/docs", app.openapi_url}
    flat = getattr(fastapi.routing, "iter_route_contexts", iter)  # newer ones keep the routes of a router in it
    found = [(route.path, route.methods) for route in flat(app.routes) if getattr(route, "methods", None)]
    return {(method, path) for path, methods in found if path not in own for method in methods - {"HEAD"}}
