"""URIs without secrets, their names and kinds, and those that are refused."""

import re
import traceback
from pathlib import Path

import pytest

from eagle3.uris import base_name, check_uri, redact, redact_secrets, redact_text, uri_kind

# (URI, redacted, whether it is refused)
URIS = [
    ("http://host/a/rows.jsonl", "http://host/a/rows.jsonl", False),
    ("https://host:80/@team/b.jsonl?X-Amz-Signature=s3cr3t#s3cr3t", "https://host:80/@team/b.jsonl", False),
    ("http://host?s3cr3t", "http://host", False),
    ("http://[::1]:80/a@b", "http://[::1]:80/a@b", False),
    ("s3://bucket/a@b:c/x", "s3://bucket/a@b:c/x", False),
    ("zip://a.jsonl::http://host/@team/b.zip?s3cr3t", "zip://a.jsonl::http://host/@team/b.zip", False),
    (
        "abfs://container@account.dfs.core.windows.net/x?sig=s3cr3t",
        "abfs://container@account.dfs.core.windows.net/x",
        False,
    ),
    ("sftp://me@host/x", "sftp://me@host/x", False),
    ("org/name:subset:train[:10%]", "org/name:subset:train[:10%]", False),
    ("/data/a?b#c@d.jsonl", "/data/a?b#c@d.jsonl", False),
    ("", "", False),
    ("http://user:s3cr3t@host/x", "http://host/x", True),
    ("HTTPS://s3cr3t@host:80", "HTTPS://host:80", True),
    ("http://user:s3cr3t/s3@cr3t@host/x", "http://host/x", True),
    ("http://user:s3cr3t?s3cr3t@host/x?s3cr3t", "http://host/x", True),
    ("s3://AKIA:s3cr3t/s3cr3t+@bucket/key", "s3://bucket/key", True),
    ("s3://key:1234@bucket/key", "s3://bucket/key", True),
    ("redis://:s3cr3t@host/1", "redis://host/1", True),
    # The end of this password is not clear.
    ("s3://key:s3@cr3t/s3@bucket/key", "s3://cr3t/s3@bucket/key", True),
    ("simplecache::http://user:s3cr3t@host/x", "simplecache::http://host/x", True),
]


@pytest.mark.parametrize(("uri", "redacted", "refused"), URIS)
def test_a_uri_loses_its_secrets_and_is_refused_with_credentials(
    uri: str, redacted: str, refused: bool
) -> None:
    assert redact(uri) == redacted
    assert redact(redacted) == redacted
    if not refused:
        assert check_uri(uri) == uri
        return
    with pytest.raises(ValueError, match="EAGLE3_SERVER_SECRET") as e:
        check_uri(uri)
    assert not re.search("s3|cr3t|1234", str(e.value).replace("s3://", ""))


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("http://host/a/rows.jsonl?X-Amz-Signature=x/y", "rows.jsonl"),
        ("http://host/a/rows/?x", "rows"),
        ("http://host:80/?x", "host:80"),
        ("/data/what?.jsonl", "what?.jsonl"),
        ("rows.jsonl", "rows.jsonl"),
    ],
)
def test_a_base_name_is_of_the_path_alone(uri: str, name: str) -> None:
    assert base_name(uri) == name


def test_a_text_loses_the_secrets_of_all_its_urls_and_nothing_else() -> None:
    text = (
        "403, message='Forbidden', url='http://host/a.jsonl?sig=s3cr3t', then s3://k:s3cr3t@b/c (why? a=b); "
        "rows.jsonl?sig=s3cr3t"
    )
    redacted = "403, message='Forbidden', url='http://host/a.jsonl', then s3://b/c (why? a=b); rows.jsonl"
    assert redact_text(text) == redacted


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("org/model", "hub"),
        ("gpt2", "hub"),
        ("org/existing", "path"),
        ("a/b/c", "path"),
        ("./model", "path"),
        ("~/model", "path"),
        ("C:\\model", "path"),
        ("model.gguf", "path"),
        ("", "path"),
        ("s3://bucket/model", "url"),
        ("file:///model", "url"),
    ],
)
def test_a_name_is_a_hub_id_unless_it_is_a_url_or_may_be_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    (tmp_path / "org" / "existing").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert uri_kind(name) == kind


class StrangeError(Exception):
    """An error of a store's client."""


URL = "http://host/x?sig=s3cr3t"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(URL), FileNotFoundError),
        (TimeoutError(f"no answer from {URL}"), ConnectionError),
        (ConnectionResetError(URL), ConnectionError),
        (UnicodeError(URL), ValueError),
        (StrangeError(URL), OSError),
    ],
)
def test_an_error_of_a_store_is_raised_without_secrets(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="http://host/x") as e, redact_secrets():
        raise error
    assert type(e.value) is kind
    assert "s3cr3t" not in "".join(traceback.format_exception(e.value))


def fail(cause: Exception) -> None:
    raise StrangeError("failed") from cause


def test_an_error_keeps_its_class_and_its_cause_unless_that_holds_secrets() -> None:
    causes = KeyError("plain"), KeyError(URL)
    for cause in causes:
        with pytest.raises(StrangeError, match="failed") as e, redact_secrets():
            fail(cause)
        assert ("KeyError" in "".join(traceback.format_exception(e.value))) == (cause is causes[0])
