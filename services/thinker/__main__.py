"""python -m services.thinker --model DIR_OR_ID: the thinker as a gRPC server."""

from services.thinker import environment

if __name__ == "__mp_main__":  # a process of vLLM's, which multiprocessing spawns
    environment.configure_logs()

if __name__ == "__main__":
    from services.common.server import main
    from services.thinker.config import ThinkerSettings

    settings = ThinkerSettings.load()
    try:
        environment.configure(settings)  # before anything imports vLLM or transformers
    except ValueError as error:
        raise SystemExit(f"invalid settings\n{error}") from None
    environment.configure_logs()

    from services.thinker.serve import STAGE, serve

    main(settings, STAGE, lambda: serve(settings))
