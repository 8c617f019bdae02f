"""What is wrong when a remote file cannot be read, as one sentence.

Each service has exceptions of its own, and fsspec passes most of them on. Names of types
and status codes identify them, so that no package is imported for its errors.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit

from lit_llm.core.errors import UserError
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

_NAMES = {
    Fault.NO_CREDENTIALS: """botocore.NoCredentialsError botocore.PartialCredentialsError botocore.CredentialRetrievalError
        botocore.TokenRetrievalError botocore.SSOError botocore.ProfileNotFound google.GoogleAuthError""",
    Fault.ADDRESS: "botocore.ParamValidationError aiohttp.InvalidURL huggingface_hub.HFValidationError",
    Fault.DENIED: "huggingface_hub.GatedRepoError builtins.PermissionError",
    Fault.MISSING: """huggingface_hub.RepositoryNotFoundError huggingface_hub.RevisionNotFoundError
        huggingface_hub.EntryNotFoundError builtins.FileNotFoundError builtins.NotADirectoryError""",
    Fault.UNREACHABLE: """huggingface_hub.OfflineModeIsEnabled aiohttp.ClientConnectionError aiohttp.ClientPayloadError
        aiohttp.ServerTimeoutError botocore.ConnectionError botocore.HTTPClientError botocore.IncompleteReadError
        httpx.TransportError httpx2.TransportError requests.ConnectionError requests.Timeout requests.ChunkedEncodingError
        fsspec.FSTimeoutError builtins.ConnectionError builtins.TimeoutError socket.gaierror ssl.SSLError""",
}
_FAULTS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""By package and class."""
_ERRNOS = {
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN), Fault.UNREACHABLE),
    **dict.fromkeys((errno.EBUSY, errno.EREMOTEIO), Fault.SERVER),  # s3fs makes these of "slow down" and "internal error"
    **dict.fromkeys((errno.EINVAL, errno.EREMCHG, errno.ENOSYS), Fault.REFUSED),  # such as by a server of another region
}

_LOG_IN = {
    **dict.fromkeys(("s3", "s3a"), "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    **dict.fromkeys(("gs", "gcs"), "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("hf", "hub"), "run `hf auth login`, or set HF_TOKEN"),
}


def fault(error: BaseException) -> Fault | None:
    """Why a remote file could not be read; None if ``error`` is something else, such as a bug."""
    for link in reversed(list(_chain(error))):  # fsspec turns most errors of HTTP into FileNotFoundError
        found = _fault_of_type(link) or _fault_of_status(_status(link))
        if found is not None:
            return found
    return None


@contextlib.contextmanager
def one_sentence(path: str) -> Iterator[None]:
    """Make an error of reading the URL ``path`` one sentence: of the network, of rights, of a file that is missing.

    Raises:
        UserError: It is such an error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind = fault(error)
        if kind is None:
            raise
        raise UserError(_sentence(kind, error, path)) from error


def _sentence(kind: Fault, error: BaseException, path: str) -> str:
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
    return f"{public_name(path)} cannot be read: {reason}."


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
    elif "gcsfs.HttpError" in _names_of(error):
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
    named = next((_FAULTS[name] for name in _names_of(error) if name in _FAULTS), None)
    return named or (_ERRNOS.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None)


def _names_of(error: BaseException) -> list[str]:
    """Package and name of the error's class, then of those that it is derived from."""
    return [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__]
