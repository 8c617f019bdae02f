"""Secrets and addresses are replaced, and nothing else is."""

from __future__ import annotations

import pytest

from lit_llm.clean.personal_data import EMAIL, SECRET, Emails, Secrets
from lit_llm.clean.rules import Removed

BASE64 = "MIIEowIBAAKCAQEAx3jYy0bW9h8cQ2Yf5m6k7l8p9q0r1s2t3u4v5w6x7y8z9A0B"
KEY = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", BASE64, BASE64, "abc=", "-----END RSA PRIVATE KEY-----"])
# Made up, in the published formats. Written in two parts, so that no scanner of repositories takes them for real.
CASES = {
    "aws": ("id = '{}'", "AKIA" + "QYLPMN5HFIQR7TUV"),
    "github_token": ("token: {}.", "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"),
    "jwt": ("Bearer {} ", "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"),
    "password_in_url": ("postgres://admin:{}@db.example.org/x", "hunter2-x"),
    "hugging_face_token": ("'{}'", "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"),
    "npm": ("//registry.example.org/:_authToken={}\n", "npm_" + "abcdefghijklmnopqrstuvwxyzABCDEF0123"),
    "private_key": ("{}\nafter", KEY),
}


@pytest.fixture(scope="module")
def redact() -> Secrets:
    return Secrets("redact")


@pytest.mark.parametrize("kind", CASES)
def test_a_secret_is_replaced_and_the_text_around_it_stays(redact, kind):
    around, secret = CASES[kind]
    assert redact(f"before {around.format(secret)}") == f"before {around.format(SECRET)}"
    found = Secrets("remove")(around.format(secret))
    assert isinstance(found, Removed) and found.rule == f"secrets/{kind}"
    assert secret not in found.detail


def test_keys_that_are_cut_off_or_escaped_are_replaced_whole(redact):
    assert redact(KEY.partition("abc=")[0]) == SECRET
    assert redact('"' + KEY.replace("\n", "\\n") + '"') == f'"{SECRET}"'
    both = redact(f"{KEY} and {KEY}")
    assert both == f"{SECRET} and {SECRET}"


@pytest.mark.parametrize(
    "text",
    [
        "Set AKIA and ghp_ prefixes; the task-list has sk-values.",
        "-----BEGIN RSA PRIVATE KEY----- marks the start of a key. Keep it secret.",
        "https://<user>:<password>@host, https://user:${TOKEN}@host, http://localhost:8080/a@b",
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709 and id 550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_prose_about_secrets_is_kept(redact, text):
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jane.doe+x@mail.example.org.", f"Write to {EMAIL}."),
        ("<a@b.io>, 'C_D@E-F.COM'; mailto:x@y.de?subject=z", f"<{EMAIL}>, '{EMAIL}'; mailto:{EMAIL}?subject=z"),
        ("@decorator @app.route a @ b x@y user@localhost npm@9.0.0 X@W.T", None),
        ("git-send <first\\-last@x.org>", f"git-send <first\\-{EMAIL}>"),
    ],
)
def test_addresses_are_replaced(text, expected):
    assert Emails("redact")(text) == (text if expected is None else expected)
    assert isinstance(Emails("remove")(text), Removed) == (expected is not None)
