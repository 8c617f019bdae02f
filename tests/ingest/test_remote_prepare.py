"""`prepare` on remote text gives the bytes that it gives on the same text of this machine."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import fork_server
import pytest
from ports import free_port

pytestmark = pytest.mark.slow  # starts many processes; `datasets` and moto take seconds to import


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The folder "data" in the working directory, with files that are named like shards."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for shard in range(3):
        path = Path(f"data/train-{shard:05d}-of-00003.jsonl")
        path.parent.mkdir(exist_ok=True)
        rows = [{"text": f"Document {shard} {row}: {hash_of(shard, row)} ünd möre.\n" * (row % 7)} for row in range(60)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def hash_of(*numbers: int) -> str:
    return " ".join(str(pow(3, number * 7919 + 11, 104_729)) for number in numbers)


def prepared(paths: str, out: str, *flags: str) -> dict[str, bytes]:
    """What `prepare` writes, its log included."""
    command = [sys.executable, "-m", "lit_llm", "prepare", "--data", "TextFiles", "--data.tokenizer", "Bytes"]
    run = fork_server.run([*command, "--data.paths", paths, "--out", out, *flags], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "secret" not in run.stdout + run.stderr + (Path(out).parent / f".{Path(out).name}.log").read_text()
    return {path.name: path.read_bytes() for path in Path(out).iterdir()}


def test_text_over_http_from_s3_and_of_a_dataset_gives_the_tokens_of_files(text, monkeypatch):
    here = prepared("data", "here")
    assert set(here) == {
        "meta.json",
        "document_ids.json",
        "tokenizer.json",
        *(f"{s}_000000.{e}" for s in ("train", "val") for e in ("bin", "docs")),
    }
    assert prepared("hub:./data", "hub", "--workers", "2") == here

    port = free_port()
    server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", "data"]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(500):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}").close()
                break
            except OSError:
                time.sleep(0.01)
        assert prepared(f"http://me:secret@127.0.0.1:{port}/", "http", "--workers", "2") == here
        process.terminate()

    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    moto.start()
    environment = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*moto.get_host_and_port()),
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "a key",
        "AWS_SECRET_ACCESS_KEY": "a secret",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="prepared")
    for path in text.iterdir():
        client.upload_file(str(path), "prepared", f"folder/{path.name}")
    assert prepared("s3://prepared/folder/*.jsonl", "s3", "--workers", "2") == here
    moto.stop()
