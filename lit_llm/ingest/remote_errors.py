"""Interpret errors of remote files: whether another attempt may succeed, and one sentence for the user about the cause.

Each service has exceptions of its own, and fsspec passes most of them on. The names of the exceptions' classes and the HTTP
status tell what an error means, so that no service's package must be imported to recognise its errors.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from lit_llm.core.errors import UserError
from lit_llm.ingest.source import public_name

_CLASSES = {
    "denied": re.compile("Credential|PermissionError|GatedRepo|Auth|Token"),
    "missing": re.compile("NotFound|NotADirectory"),
    "broken": re.compile("Connect|Timeout|Payload|IncompleteRead|Transport|ChunkedEncoding|gaierror|SSL|Offline"),
}
"""Meaning of an error → a pattern in the name of its class or of a base class. "broken": another attempt may succeed."""
_PACKAGES = re.compile("(botocore|aiohttp|fsspec|s3fs|gcsfs|google|huggingface_hub|httpx|requests)[.]")
_STATUSES = {401: "denied", 403: "denied", 404: "missing", 408: "broken", 410: "missing", 412: "changed", 429: "broken"}
_LOG_IN = {
    **dict.fromkeys(("s3", "s3a"), "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    **dict.fromkeys(("gs", "gcs"), "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("hf", "hub"), "run `hf auth login`, or set HF_TOKEN"),
}


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed after ``error``: the connection broke, or the server cannot answer now."""
    return _meaning(error) == "broken"


@contextlib.contextmanager
def one_sentence(path: str) -> Iterator[None]:
    """A context manager that turns an error of reading the URL ``path`` into a UserError of one sentence. Errors that are not
    about the remote file, such as bugs, are not changed.

    Raises:
        UserError: The network or the server fails, access is denied, or the file is missing or has changed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        meaning = _meaning(error)
        if meaning is None:
            raise
        codes = [f" (status {status})" for link in _chain(error) if (status := _status(link))]
        code = codes[-1] if codes else ""
        log_in = _LOG_IN.get(urlsplit(path).scheme.lower(), "check the user and the password")
        reason = {
            "missing": "it does not exist, or is private",
            "denied": f"access is denied{code}; {log_in}",
            "broken": f"the server cannot be reached or does not answer{code}; check the address and the network",
            "changed": "it has changed since this command started; start it again",
            "refused": f"the server refuses the request{code}; check the address, the region and the credentials",
        }[meaning]
        raise UserError(f"{public_name(path)} cannot be read: {reason}.") from error


def _meaning(error: BaseException) -> str | None:
    """The cause of an error of a remote file: "missing", "denied", "broken", "changed" or "refused"; None for other errors."""
    for link in reversed(list(_chain(error))):  # fsspec turns most errors of HTTP into FileNotFoundError
        names = [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(link).__mro__]
        if reason := next((meaning for meaning, name in _CLASSES.items() if any(map(name.search, names))), None):
            return reason
        if status := _status(link):
            return _STATUSES.get(status, "broken" if status >= 500 else "refused")
        if any(map(_PACKAGES.match, names)):
            return "refused"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of the cause, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _status(error: BaseException) -> int | None:
    """The HTTP status, from 300 to 599, of the server's answer in an exception; None if the exception has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:  # httpx and requests, aiohttp, or gcsfs
        status = getattr(response, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) and 300 <= status < 600 else None
