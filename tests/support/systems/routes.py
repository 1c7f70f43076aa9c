"""The endpoints of a gateway."""

from typing import Any

import fastapi.routing


def endpoints(app: Any) -> set[tuple[str, str]]:
    """(method, path) of all that the gateway defines, without HEAD and FastAPI's own documents; paths with their
    parameters in braces."""
    own = {app.docs_url, app.redoc_url, app.openapi_url, app.swagger_ui_oauth2_redirect_url}
    flat = getattr(fastapi.routing, "iter_route_contexts", iter)  # newer ones keep the routes of a router in it
    found = [(route.path, route.methods) for route in flat(app.routes) if getattr(route, "methods", None)]
    return {(method, path) for path, methods in found if path not in own for method in methods - {"HEAD"}}
