"""python -m services.aligner --model DIR_OR_ID: the aligner as a gRPC server."""

from services.aligner.config import AlignerSettings
from services.aligner.servicer import SERVICE_NAME, serve
from services.common.stage import main

if __name__ == "__main__":
    main(AlignerSettings.load(), "aligner", SERVICE_NAME, serve, streams=False)
