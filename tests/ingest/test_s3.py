"""Files on S3, from a server on this machine (moto)."""

import time

import pytest
from http_server import serving
from ports import free_port

from lit_llm.core.errors import UserError
from lit_llm.ingest.open_source import open_source
from lit_llm.ingest.paths import list_sources

pytestmark = pytest.mark.slow  # moto takes seconds to import
CONTENT = b"".join(b"line %d of the text\n" % number for number in range(1_000_000))  # several blocks of 8 MiB
LOG_IN = "run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No credentials but those of a test, and the address of an S3 server."""
    import s3fs

    def use(address, *, key="a key"):
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        if key:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")

    yield use
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(server, environment):
    """Write an object of s3://texts."""
    import boto3

    environment(server)
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    written = []

    def put(key, content):
        client.put_object(Bucket="texts", Key=key, Body=content)
        written.append(key)

    put("a/large.txt", CONTENT)
    put("a/b/small.txt", b"small")
    put("a/b/empty.txt", b"")
    put("a/.hidden/x.txt", b"hidden")
    yield put
    for key in written:
        client.delete_object(Bucket="texts", Key=key)
    client.delete_bucket(Bucket="texts")


def listed(pattern):
    sources, problems = list_sources(pattern, flag="--data.paths")
    return [(source.path, source.size) for source in sources], problems


def test_content_is_read_in_order_and_from_any_place(bucket):
    (source,) = list_sources("s3://texts/a/large.txt", flag="--data.paths")[0]
    with open_source(source) as file:
        assert file.read() == CONTENT
        assert file.tell() == len(CONTENT)
        assert file.seek(-7, 2) == len(CONTENT) - 7
        assert file.read() == CONTENT[-7:]
        file.seek(12_345_678)
        assert file.read(9) == CONTENT[12_345_678:][:9]


def test_a_changed_object_is_not_read(bucket):
    sources, _ = list_sources(["s3://texts/a/b/*", "s3://texts/a/large.txt"], flag="--data.paths")
    small, large = sources
    bucket("a/b/small.txt", b"SMALL")
    with pytest.raises(UserError, match=r"s3://texts/a/b/small.txt has changed since this command started: start it again"):
        open_source(small)
    with open_source(large) as file:
        file.read(1)
        bucket("a/large.txt", CONTENT[::-1])
        with pytest.raises(UserError, match=r"s3://texts/a/large.txt .*has changed since this command started"):
            file.read()


def test_missing_objects_and_buckets_are_one_sentence(bucket):
    for url in ("s3://texts/none.txt", "s3://nothing/a.txt", "s3://nothing"):
        assert listed(url)[1][0].startswith(f"{url} cannot be read: it does not exist")
    for url in ("s3://texts/*.zip", "s3://nothing/*.txt"):
        assert listed(url)[0] == [] and len(listed(url)[1]) == 1
    said = "s3://*/a.txt searches the whole server: give a bucket before the first wildcard (--data.paths)."
    assert listed("s3://*/a.txt") == ([], [said])


def test_no_credentials_a_refusal_and_a_silent_server_are_one_sentence(server, environment):
    started = time.monotonic()
    url = "s3://texts/a.txt"
    environment(server, key="")
    assert listed(url) == ([], [f"{url} cannot be read: access is denied; {LOG_IN} (--data.paths)."])
    closed = f"http://127.0.0.1:{free_port()}"
    environment(closed)
    said = "the server cannot be reached or does not answer; check the address and the network"
    assert listed(url) == ([], [f"{url} cannot be read: {said} (--data.paths)."])
    with serving() as refusing:
        environment(f"{refusing}/status/403")
        said = f"access is denied (status 403); {LOG_IN}"
        assert listed(url) == ([], [f"{url} cannot be read: {said} (--data.paths)."])
        environment(f"{refusing}/status/503")
        said = "the server cannot be reached or does not answer (status 503); check the address and the network"
        assert listed(url) == ([], [f"{url} cannot be read: {said} (--data.paths)."])
    assert time.monotonic() - started < 60
