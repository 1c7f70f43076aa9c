"""Runs first in each process that vLLM spawns, before anything of vLLM's is imported there: see `__main__`."""

from services.thinker import environment

if __name__ == "__mp_main__":
    environment.configure_logs()
