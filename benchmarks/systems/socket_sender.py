"""The other end of a raw Unix socket: `python socket_sender.py FD SIZE_BYTES COUNT in-turn|at-once`."""

import socket
import sys


def main() -> None:
    descriptor, size_bytes, count = map(int, sys.argv[1:4])
    payload = b"\1" * size_bytes
    with socket.socket(fileno=descriptor) as theirs:
        theirs.sendall(b"x")
        for _ in range(count):
            theirs.sendall(payload)
            if sys.argv[4] == "in-turn":
                theirs.recv(1)


if __name__ == "__main__":
    main()
