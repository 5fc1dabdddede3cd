"""Runs the application under uvicorn: binding early, and shutting down without losing answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from merestone.serve.app import create_app
from merestone.serve.service import Service


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
    ``announce`` is called when connections are accepted."""

    def __init__(
        self, service: Service, grace: float = 10.0, announce: Callable[[], None] | None = None
    ) -> None:
        config = uvicorn.Config(
            create_app(service),
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(grace) + 5,
        )
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._announce is not None:
            self._announce()

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
) -> None:
    """Serve until SIGINT or SIGTERM; returns when everything has ended."""
    Server(service, grace, announce).run(sockets=[listener])
