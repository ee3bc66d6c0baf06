"""Errors of requests, in the shape that OpenAI's API gives them."""

from collections.abc import Mapping
from typing import cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse


class RequestError(HTTPException):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: one line.
        param: the field that is wrong.
        code: OpenAI's name of the error, if it has one.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer to a request that failed."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": said}, status, headers)


def answer_errors(app: FastAPI) -> None:
    """Have an application answer each error by :func:`error_response`."""
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _not_an_object)
    app.add_exception_handler(Exception, _failed)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    error = cast("HTTPException", error)
    status = 400 if error.status_code == 422 else error.status_code  # OpenAI has no 422
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return error_response(status, error.detail, param=param, code=code, headers=error.headers)


async def _not_an_object(_: Request, error: Exception) -> JSONResponse:
    first = cast("RequestValidationError", error).errors()[0]  # the routes ask for an object, and for no more
    reason = first.get("ctx", {}).get("error", first["msg"])
    return error_response(400, f"the request must be a JSON object: {reason}")


async def _failed(*_: object) -> JSONResponse:
    return error_response(500, "the server failed")
