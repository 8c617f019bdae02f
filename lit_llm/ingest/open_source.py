"""Open a source: a file of this machine, or a remote file, which fsspec reads from its start to its end."""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from lit_llm.core.errors import UserError, need
from lit_llm.ingest.remote_errors import may_pass, one_sentence
from lit_llm.ingest.source import Source, changed, is_http, public_name, state_of

Result = TypeVar("Result")

BLOCK_BYTES = 2**23  # bytes per request: the overhead of a request takes as long as the transfer of about a megabyte
_BUFFER_BYTES = 2**18
_ATTEMPTS, _FIRST_PAUSE = 5, 0.5  # attempts until a byte arrives; seconds of the first pause, which doubles each time
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 20
_VERSION_KEYS = (
    "ETag", "etag", "generation", "blob_id", "checksum", "md5Hash", "content_md5", "Content-MD5", "Digest",
    "LastModified", "Last-Modified", "last_modified", "updated", "mtime",
)  # fmt: skip


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path of the file in this file system. No request is sent to the server.

    Raises:
        UserError: The address is not valid, the protocol is unknown, or the protocol's package is not installed.
    """
    fsspec = need("fsspec", what=public_name(url))
    if "::" in url and not is_http(url):
        raise UserError(f"{public_name(url)} is a chained URL: give the file itself.")
    if not _is_address(url):
        raise UserError(f"{public_name(url)} is not a valid address: check its spelling.")
    protocol = urlsplit(url).scheme.lower()
    if protocol not in {*fsspec.available_protocols(), *fsspec.registry}:
        raise UserError(f"{public_name(url)}: {protocol}:// is not a known protocol; use s3://, gs://, hf:// or https://.")
    try:
        options = _options(url)
        return (fsspec.filesystem(protocol, **options), url) if is_http(url) else fsspec.url_to_fs(url, **options)
    except ImportError as error:
        package = _package(protocol, error)
        raise UserError(f"{public_name(url)} needs the package {package}: pip install {package}.") from error


def _package(protocol: str, error: ImportError) -> str:
    """The name of the package to install for a protocol: the package that contains the protocol's file system or, if fsspec
    itself contains it, the package whose import has failed (``error``)."""
    from fsspec.registry import known_implementations

    package = re.split("[.:]", known_implementations[protocol]["class"])[0]
    missing = getattr(error.__cause__, "name", None) or package
    return missing.partition(".")[0] if package == "fsspec" else package


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.netloc if is_http(url) else f"{parts.netloc}{parts.path.strip('/')}") and (parts.port or 0) >= 0
    except ValueError:  # the port is not a number or too large, or a bracket is not closed
        return False


def version(info: Mapping[str, Any]) -> str:
    """The checksum, ETag or modification time in ``info``, a server's description of a file; "" if ``info`` has none."""
    return next((f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key)), "")


def open_source(source: Source) -> BinaryIO:
    """Open a source as a binary file at its start. ``tell`` gives the number of bytes read so far.

    If the connection to a remote file breaks, the file is requested again from the same byte on, if the server allows that.
    ``seekable`` is false for a file over HTTP.

    Raises:
        UserError: The file cannot be read, or has changed since it was listed.
    """
    if not source.is_local:
        return io.BufferedReader(_RemoteFile(source), _BUFFER_BYTES)
    try:
        file = open(source.path, "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise UserError(f"{source.path} cannot be read: {error.strerror}.") from error
    if state_of(os.fstat(file.fileno())) != (source.size, source.version):
        file.close()
        raise changed(source)
    return file


def _options(url: str) -> dict[str, Any]:
    """Options of fsspec for a URL: timeouts of seconds (fsspec's own: minutes), and for HTTP no decompression of content."""
    protocol = urlsplit(url).scheme.lower()
    if is_http(url):
        aiohttp = need("aiohttp", what=public_name(url))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_ANSWER_SECONDS)
        return {
            "simple_links": False,
            "client_kwargs": {"timeout": timeout, "trust_env": True, "auto_decompress": False, "read_bufsize": _BUFFER_BYTES},
        }
    if protocol in ("s3", "s3a"):  # s3fs repeats a request itself
        return {
            "config_kwargs": {
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _ANSWER_SECONDS,
                "retries": {"max_attempts": 0},
            }
        }
    if protocol in ("gs", "gcs"):
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else it prints a traceback for an error that it raises
        return {"requests_timeout": _ANSWER_SECONDS}
    return {}


class _RemoteFile(io.RawIOBase):
    """A remote file that is read in order. If the connection breaks, the file is opened again at the next byte to read."""

    def __init__(self, source: Source) -> None:
        self._source, self._position = source, 0
        self._file: Any = None
        self._fs, self._path = file_system(source.path)
        self._http = is_http(source.path)
        with one_sentence(source.path):
            if not self._http:  # an HTTP answer has the version of its content: see `_open_stream`
                self._repeat(self._require_unchanged)
            self._repeat(self._open)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._http

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._http:
            raise io.UnsupportedOperation("seek")
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if self._file is not None:
            self._file.seek(self._position)
        return self._position

    def readinto(self, buffer: Any) -> int:
        with one_sentence(self._source.path):
            data = self._repeat(lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._disconnect()
        super().close()

    def _disconnect(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, size: int) -> bytes:
        if self._file is None:
            self._open()
        data: bytes = self._file.read(size)
        if not data and self._position < self._source.size:
            raise ConnectionError("the content is shorter than listed")
        return data

    def _repeat(self, action: Callable[[], Result]) -> Result:
        """Run ``action`` up to ``_ATTEMPTS`` times, with a new connection after each failure that another attempt may cure."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:
                if isinstance(error, UserError) or not may_pass(error) or attempt == _ATTEMPTS:
                    raise
                self._disconnect()
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    def _require_unchanged(self) -> None:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path)
        if (info.get("size") or 0, version(info)) != (self._source.size, self._source.version):
            raise changed(self._source)

    def _open(self) -> None:
        """Open the remote file at the next byte to read."""
        if self._http:
            return self._open_stream()
        self._file = self._fs.open(self._path, "rb", block_size=BLOCK_BYTES)
        if self._position:
            self._file.seek(self._position)

    def _open_stream(self) -> None:
        """Send one HTTP request for the file, from the next byte to read to the end, and open the answer as a stream. Raises a
        UserError if the server can send the file only from its start, or the file has changed."""
        headers = {"Accept-Encoding": "identity"}
        if self._position:
            headers["Range"] = f"bytes={self._position}-"
        self._file = self._fs.open(self._path, "rb", block_size=0, headers=headers, size=self._source.size or None)
        answer = self._file.r
        if version(answer.headers) != self._source.version:
            raise changed(self._source)
        if self._position and answer.status != 206:
            raise UserError(
                f"{self._source.name} cannot be read: the connection broke after {self._position:,} bytes, and the server does "
                "not continue a transfer; download the file first."
            )
