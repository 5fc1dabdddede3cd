"""Runs the application under uvicorn: binding early, and shutting down without losing answers."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from merestone.serve.app import create_app
from merestone.serve.service import Service

LINGER_S = 2.0
"""How long a server without an engine still answers: clients get their errors, ``/health`` says
why."""
IDLE_S = 120
"""How long a connection without a request is kept: longer than clients and proxies do, which is for
5 to 90 seconds. Were it ended by us first, a request that is just being sent would be lost."""
SWITCH_S = 0.0005
"""How long a thread that needs the interpreter waits for one that does not let go. The engine's
thread needs it again after every wait for its device: Python's 5 ms would be most of a step beside
a server that is busy with replies."""


class AddressRefused(OSError):
    """The host and port cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """Take the address, before a model is loaded for nothing. Nobody is accepted yet.

    Raises:
        AddressRefused: it is in use, or not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise AddressRefused(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class Server(uvicorn.Server):
    """uvicorn, with a grace period: requests in flight may end by themselves, then the engine ends
    them and their clients get what there is. A second signal ends everything at once.
    ``announce`` is called when connections are accepted. When the engine is lost for good, the
    server ends too, after ``LINGER_S``."""

    def __init__(
        self, service: Service, grace: float = 10.0, announce: Callable[[], None] | None = None
    ) -> None:
        config = uvicorn.Config(
            create_app(service),
            access_log=False,
            log_config=None,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=int(grace) + 5,
        )
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._announce = announce
        self.lost: str | None = None
        """Why the engine is gone for good, if it is."""
        self._linger_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._announce is not None:
            self._announce()

    async def on_tick(self, counter: int) -> bool:
        if self.lost is None:
            health = self._service.engine.health()
            if health["status"] == "lost":
                self.lost = str(health["reason"])
                self._linger_until = time.monotonic() + LINGER_S
        elif time.monotonic() > self._linger_until:
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # not recorded: uvicorn would raise it again at the end, and the exit code be lost
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def end_flights() -> None:
            await asyncio.sleep(self._grace)
            self._service.abort_all()

        ending = asyncio.create_task(end_flights())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def run(
    service: Service, listener: socket.socket, grace: float, announce: Callable[[], None]
) -> str | None:
    """Serve until SIGINT or SIGTERM, or until the engine is lost; returns when everything has
    ended: why the engine was lost, or None. The process is the server's from here on."""
    sys.setswitchinterval(SWITCH_S)
    # What was loaded stays: to look through it for garbage would stop every stream for 0.1 s.
    gc.collect()
    gc.freeze()
    server = Server(service, grace, announce)
    server.run(sockets=[listener])
    return server.lost
