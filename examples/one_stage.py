"""One stage alone, without a gateway: asks a diffusion stage for a picture over gRPC, and writes it as a PNG.

python -m services.dit --model quartet-demo-painter --port 50054
python examples/one_stage.py "a yellow cross on a blue ground" cross.png
"""

import os
import sys
import uuid

import grpc
import numpy as np
from PIL import Image

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2, server_info_pb2_grpc

ADDRESS = os.environ.get("DIT_ADDRESS", "127.0.0.1:50054")


def main(prompt: str, file: str) -> None:
    """Prints the denoising steps as they come."""
    with grpc.insecure_channel(ADDRESS, [("grpc.max_receive_message_length", 16 << 20)]) as channel:
        info = server_info_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(
            server_info_pb2.GetServerInfoRequest(), timeout=10
        )
        print(f"{info.model}: {info.dit.pipeline}, {info.dit.default_width} x {info.dit.default_height} pixels")
        start = dit_pb2.DitStart(request_id=uuid.uuid4().hex, prompt=prompt, seed=7)
        requests = iter([dit_pb2.DitServiceGenerateRequest(start=start)])
        rows: dict[int, np.ndarray] = {}  # by the number of the first: pieces have some rows of the picture each
        for response in dit_pb2_grpc.DitServiceStub(channel).Generate(requests):
            if response.HasField("progress"):
                print(f"step {response.progress.step} of {response.progress.num_inference_steps}")
            elif response.HasField("piece"):
                data = response.piece.data
                rows[response.piece.first] = np.frombuffer(data.inline, np.uint8).reshape(tuple(data.shape))
            elif response.HasField("summary"):
                print(f"{response.summary.timings.total_ms:.0f} ms")
    Image.fromarray(np.concatenate([rows[first] for first in sorted(rows)])).save(file)


if __name__ == "__main__":
    main(*sys.argv[1:3])
