"""Errors in the shape of the OpenAI API."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_UNION_MEMBERS = {"str", "int", "float", "bool", "dict", "list", "none"}


class ApiError(Exception):
    """A request that is refused: HTTP status, message, and the parameter at fault."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def unsupported(param: str, what: str) -> ApiError:
    """An option that exists in the API and not here."""
    return ApiError(f"{what} is not supported", param, "unsupported")


def unavailable(reason: str) -> ApiError:
    """The engine does not run, or not any more."""
    return ApiError(reason, code="engine_unavailable", status=503)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that a body's validation found."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # A value that no member of a union takes has an error of each: what the one it was meant for
    # says is about more than its type, or about a part of it.
    first = max(
        (entry for entry in found if entry["loc"][:1] == found[0]["loc"][:1]),
        key=lambda entry: (not entry["type"].endswith("_type"), len(entry["loc"])),
    )
    if first["type"] == "json_invalid":
        detail = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(f"The request body is not valid JSON: {detail}", code="invalid_json")
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(f"{param}: {message}" if param else message, param, "invalid_value")


def _path(place: tuple[int | str, ...]) -> str | None:
    """``messages[0].role``; the name of a union's member is not the user's field."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_MEMBERS or "[" in part or "(" in part or "-" in part:
            continue
        else:
            path += f".{part}" if path else part
    return path or None
