"""What is wrong when a remote file cannot be read, as one sentence.

Each service has exceptions of its own, and fsspec passes most of them on. They are told apart by their types and status codes.
A type is looked up among the imported modules: whoever raised it has imported it, and no package is imported for its errors.
"""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit

from lit_llm.ingest.source import public_name


class Fault(Enum):
    """Why a remote file cannot be read."""

    MISSING = "missing"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    UNREACHABLE = "unreachable"
    """No connection, or one that broke: another attempt may succeed."""
    SERVER = "server"
    """The server cannot answer now: another attempt may succeed."""
    REFUSED = "refused"
    ADDRESS = "address"
    CHANGED = "changed"


RETRIED = frozenset({Fault.UNREACHABLE, Fault.SERVER})

_TYPES = [
    (
        Fault.NO_CREDENTIALS,
        "botocore.exceptions",
        ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    ),
    (Fault.NO_CREDENTIALS, "botocore.exceptions", ("TokenRetrievalError", "SSOError", "ProfileNotFound")),
    (Fault.NO_CREDENTIALS, "google.auth.exceptions", ("GoogleAuthError",)),
    (Fault.ADDRESS, "botocore.exceptions", ("ParamValidationError",)),
    (Fault.ADDRESS, "aiohttp", ("InvalidURL",)),
    (Fault.ADDRESS, "huggingface_hub.errors", ("HFValidationError",)),
    (Fault.DENIED, "huggingface_hub.errors", ("GatedRepoError",)),
    (Fault.MISSING, "huggingface_hub.errors", ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError")),
    (Fault.UNREACHABLE, "huggingface_hub.errors", ("OfflineModeIsEnabled",)),
    (Fault.UNREACHABLE, "aiohttp", ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError")),
    (Fault.UNREACHABLE, "botocore.exceptions", ("ConnectionError", "HTTPClientError", "IncompleteReadError")),
    (Fault.UNREACHABLE, "httpx", ("TransportError",)),
    (Fault.UNREACHABLE, "httpx2", ("TransportError",)),
    (Fault.UNREACHABLE, "requests.exceptions", ("ConnectionError", "Timeout", "ChunkedEncodingError")),
    (Fault.UNREACHABLE, "fsspec.exceptions", ("FSTimeoutError",)),
]
_BUILTIN: list[tuple[Fault, tuple[type[BaseException], ...]]] = [
    (Fault.MISSING, (FileNotFoundError, NotADirectoryError)),
    (Fault.DENIED, (PermissionError,)),
    (Fault.UNREACHABLE, (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)),
]
_BUSY = frozenset({errno.EBUSY, errno.EREMOTEIO})  # s3fs translates "slow down" and "internal error" into these
_REFUSED = frozenset({errno.EINVAL, errno.EREMCHG, errno.ENOSYS})  # other answers, such as that of a server of another region
_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})

_LOG_IN = {
    "s3": "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "s3a": "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run `hf auth login`, or set HF_TOKEN",
    "hub": "run `hf auth login`, or set HF_TOKEN",
}


def fault(error: BaseException) -> Fault | None:
    """Why a remote file could not be read; None if ``error`` is something else, such as a bug."""
    for link in reversed(list(_chain(error))):  # fsspec turns most errors of HTTP into FileNotFoundError
        found = _fault_of_type(link) or _fault_of_status(_status(link))
        if found is not None:
            return found
    return None


def sentence(error: BaseException, path: str, *, flag: str | None = None) -> str | None:
    """One sentence for an error of reading the URL ``path``; None if ``error`` is something else."""
    kind = fault(error)
    if kind is None:
        return None
    protocol, host = urlsplit(path).scheme.lower(), urlsplit(path).netloc.rpartition("@")[2]
    statuses = [status for link in _chain(error) if (status := _status(link))]
    code = f" (status {statuses[-1]})" if statuses else ""
    log_in = _LOG_IN.get(protocol, "check the user and the password")
    reason = {
        Fault.MISSING: "it does not exist" + (f", or is private; {log_in}" if protocol in ("hf", "hub") else ""),
        Fault.DENIED: f"access is denied{code}; check its rights, or {log_in}",
        Fault.NO_CREDENTIALS: f"no valid credentials were found; {log_in}",
        Fault.UNREACHABLE: f"{host if protocol in ('http', 'https') else 'the server'} cannot be reached or does not answer; "
        "check the address and the network",
        Fault.SERVER: f"the server cannot answer now{code}; try again later",
        Fault.CHANGED: "it has changed since this command started; start it again",
        Fault.REFUSED: f"the server refuses the request{code}; check the address, the region and the credentials",
        Fault.ADDRESS: "the address is not valid; check its spelling",
    }[kind]
    return f"{public_name(path)} cannot be read: {reason}{'' if flag is None else f' ({flag})'}."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _status(error: BaseException) -> int | None:
    """The status of an HTTP answer that an exception carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif _is(error, "gcsfs.retry", "HttpError"):
        status = getattr(error, "code", None)
    else:  # httpx and requests, or aiohttp
        status = getattr(response, "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) and 300 <= status < 600 else None


def _fault_of_status(status: int | None) -> Fault | None:
    if status is None:
        return None
    if status in (401, 403, 407):
        return Fault.DENIED
    if status in (404, 410):
        return Fault.MISSING
    if status == 412:  # s3fs asks for the ETag that it saw when it opened the file
        return Fault.CHANGED
    return Fault.SERVER if status >= 500 or status in (408, 429) else Fault.REFUSED


def _fault_of_type(error: BaseException) -> Fault | None:
    for kind, module, names in _TYPES:
        if _is(error, module, *names):
            return kind
    for kind, builtin in _BUILTIN:
        if isinstance(error, builtin):
            return kind
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_ROUTE:
        return Fault.UNREACHABLE
    if number in _BUSY:
        return Fault.SERVER
    return Fault.REFUSED if number in _REFUSED else None


def _is(error: BaseException, module: str, *names: str) -> bool:
    """Whether the error is of one of the types that an imported module has under these names."""
    types = [getattr(sys.modules.get(module), name, None) for name in names]
    return any(isinstance(known, type) and isinstance(error, known) for known in types)
