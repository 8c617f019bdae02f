"""Rules that replace secrets and e-mail addresses in documents, or remove documents with secrets or addresses.

Secrets are found by patterns with a fixed mark, such as ``AKIA`` or ``ghp_``. Most patterns are from detect-secrets, a package
whose detectors of high entropy and of words such as "password" are not used: they also find hashes, identifiers and prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lit_llm.clean.rules import Removed
from lit_llm.core.errors import need

ACTIONS = ("redact", "remove")
SECRET, EMAIL = "<SECRET>", "<EMAIL>"

# Every quantifier is bounded: a long run of letters must not take quadratic time.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9_])[A-Za-z0-9_](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?"
    rf"@(?:{_LABEL}\.){{1,8}}(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z]{{2,24}})(?![A-Za-z0-9_-])"
)


class _Pattern(NamedTuple):
    kind: str
    mark: str
    """A text that every match of the pattern contains: documents without this text are not searched. "": there is none."""
    pattern: re.Pattern[str]


# Detector of detect-secrets → the mark of its patterns. Its other detectors search for words such as "id" near hex digits.
_DETECTORS = {
    "aws.AWSKeyDetector": "",
    "azure_storage_key.AzureStorageKeyDetector": "AccountKey=",
    "discord.DiscordBotTokenDetector": "",
    "github_token.GitHubTokenDetector": "gh",
    "gitlab_token.GitLabTokenDetector": "",
    "mailchimp.MailchimpDetector": "-us",
    "pypi_token.PypiTokenDetector": "pypi-Ag",
    "sendgrid.SendGridDetector": "SG.",
    "slack.SlackDetector": "",
    "square_oauth.SquareOAuthDetector": "sq0csp-",
    "stripe.StripeDetector": "k_live_",
    "telegram_token.TelegramBotTokenDetector": "",
    "twilio.TwilioKeyDetector": "",
}
# Patterns that detect-secrets lacks, or that replace its own: it finds only the first line of a private key, and its patterns
# for npm, OpenAI, web tokens and passwords in URLs take quadratic time.
_KEY = r"-----BEGIN (?P<kind>[A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?)-----"
_OWN = (
    _Pattern(
        "private_key",
        "PRIVATE KEY",
        # The key is complete, or cut off: then only its lines of base64 match. Line ends may be escaped.
        re.compile(
            rf"(?P<secret>{_KEY}(?:(?:(?!-----)[\s\S]){{32,20000}}?-----END (?P=kind)-----"
            r"|(?:\s|\\[nr])*(?:[A-Za-z0-9+/=]{32,100}(?:\s|\\[nr]|[\"',+])*)+))"
        ),
    ),
    # Placeholders such as <password>, ${password} and *** are no secrets.
    _Pattern("password_in_url", "://", re.compile(r"://[^\s{}<>$*/:@]{1,64}:(?P<secret>[^\s{}<>$*/:@]{1,128})@")),
    _Pattern("jwt", "eyJ", re.compile(r"(?<![A-Za-z0-9_-])eyJ[\w-]{10,4000}\.eyJ[\w-]{10,20000}\.[\w-]{0,2000}", re.ASCII)),
    _Pattern(
        "npm", ":_authToken=", re.compile(r":_authToken=[\s\"']{0,3}(?P<secret>npm_\w{20,60}|[A-Fa-f0-9-]{36})", re.ASCII)
    ),
    _Pattern("openai", "T3BlbkFJ", re.compile(r"(?<![A-Za-z0-9])sk-[\w-]{20,200}T3BlbkFJ[\w-]{20,200}", re.ASCII)),
    _Pattern("github_token", "github_pat_", re.compile(r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}")),
    _Pattern("google_api_key", "AIza", re.compile(r"(?<![A-Za-z0-9_-])AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])")),
    _Pattern("hugging_face_token", "hf_", re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z]{34}(?![A-Za-z0-9])")),
)
_SHORTEST_GROUP = 16  # characters; shorter groups of detect-secrets' patterns are marks, such as "ghp"


@dataclass
class Secrets:
    """A rule that redacts keys, access tokens and passwords, or removes documents with them.

    Args:
        action: "redact" replaces each secret by ``SECRET``, "remove" removes a document with a secret.

    Raises:
        UserError: The package detect-secrets is not installed.
    """

    action: str

    def __post_init__(self) -> None:
        self._patterns = [*_OWN, *_detectors()]

    def __call__(self, text: str) -> str | Removed:
        spans = sorted(self._find(text))
        if not spans:
            return text
        if self.action == "remove":
            start, _, kind = spans[0]
            return Removed(f"secrets/{kind}", f"at character {start}", secret=True)
        kept, end = [], 0
        for start, stop, _ in spans:
            if start >= end:
                kept += [text[end:start], SECRET]
            end = max(end, stop)
        return "".join(kept) + text[end:]

    def _find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (first character, end, kind) of each secret: positions in the text, and a name. Secrets may overlap."""
        for kind, mark, pattern in self._patterns:
            if mark in text:
                for match in pattern.finditer(text):
                    yield (*_secret_span(match), kind)


@dataclass
class Emails:
    """A rule that redacts e-mail addresses in ASCII, or removes documents with addresses.

    Args:
        action: "redact" replaces each address by ``EMAIL``, "remove" removes a document with an address.
    """

    action: str

    def __call__(self, text: str) -> str | Removed:
        if "@" not in text:
            return text
        if self.action == "redact":
            return _EMAIL.sub(EMAIL, text)
        match = _EMAIL.search(text)
        return text if match is None else Removed("emails/found", f"at character {match.start()}", secret=True)


def _secret_span(match: re.Match[str]) -> tuple[int, int]:
    """First character and end of the secret in a match: of the group "secret"; if the pattern has no such group, of the longest
    group if it has ``_SHORTEST_GROUP`` characters or more, else of the whole match."""
    if "secret" in match.re.groupindex:
        return match.span("secret")
    groups = [i for i in range(1, match.re.groups + 1) if match[i] is not None]
    longest = max(groups, key=lambda i: len(match[i]), default=0)
    return match.span(longest if len(match[longest]) >= _SHORTEST_GROUP else 0)


def _detectors() -> Iterator[_Pattern]:
    for name, mark in _DETECTORS.items():
        module, _, cls = name.partition(".")
        detector = getattr(need(f"detect_secrets.plugins.{module}", what="secrets"), cls)()
        for pattern in detector.denylist:
            yield _Pattern(module, mark, pattern)
