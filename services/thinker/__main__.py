"""python -m services.thinker --model DIR_OR_ID: the thinker as a gRPC server."""

from importlib.util import find_spec

from services.common.engine.process import end_now
from services.common.stage import main
from services.thinker import environment
from services.thinker.config import ThinkerSettings

if __name__ == "__main__":
    settings = ThinkerSettings.load()
    try:
        environment.configure(settings)  # before anything imports vLLM or transformers
    except ValueError as error:
        raise SystemExit(f"invalid settings\n{error}") from None
    environment.configure_logs()
    __spec__ = find_spec("services.thinker.environment")  # runs in vLLM's processes, where a __main__.py would not

    from services.thinker.servicer import SERVICE_NAME, serve

    main(settings, "thinker", SERVICE_NAME, serve)
    end_now()
