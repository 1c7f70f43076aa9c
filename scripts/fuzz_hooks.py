"""What schemathesis is told beside the OpenAPI document: the models that are there. Another one is a 404 at once."""

import schemathesis  # pyright: ignore[reportMissingImports]  of the extra "fuzz"

_OF_DIT = ("/v1/images", "/v1/videos", "/v1/audio/generations")


@schemathesis.hook
def map_body(context, body):
    """Has a body that names a model, name one that is there."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "scripted-dit" if context.operation.path.startswith(_OF_DIT) else "scripted"
    return body
