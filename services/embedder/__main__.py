"""python -m services.embedder --model DIR_OR_ID: the embedder as a gRPC server."""

from importlib.util import find_spec

from services.common.engine.process import end_now
from services.common.stage import main
from services.embedder.config import EmbedderSettings
from services.thinker import environment

if __name__ == "__main__":
    settings = EmbedderSettings.load()
    try:
        environment.configure(settings, "embedder")  # before anything imports vLLM or transformers
    except ValueError as error:
        raise SystemExit(f"invalid settings\n{error}") from None
    environment.configure_logs()
    __spec__ = find_spec("services.thinker.environment")  # runs in vLLM's processes, where a __main__.py would not

    from services.embedder.servicer import SERVICE_NAME, serve

    main(settings, "embedder", SERVICE_NAME, serve, streams=False)
    end_now()
