"""Places as they may be shown, their names, and those that are refused."""

import re
import traceback

import pytest

from eagle3.uris import base_name, check_uri, redact, redact_secrets, redact_text

# (place, as it may be shown, whether it is refused)
PLACES = [
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
    (
        "s3://key:s3@cr3t/s3@bucket/key",
        "s3://cr3t/s3@bucket/key",
        True,
    ),  # a password that cannot be told from host and path
    ("simplecache::http://user:s3cr3t@host/x", "simplecache::http://host/x", True),
]


@pytest.mark.parametrize(("place", "as_shown", "refused"), PLACES)
def test_a_place_is_shown_without_what_may_be_secret(place: str, as_shown: str, refused: bool) -> None:
    assert redact(place) == as_shown
    assert redact(as_shown) == as_shown
    if not refused:
        assert check_uri(place) == place
        return
    with pytest.raises(ValueError, match="EAGLE3_SERVER_SECRET") as e:
        check_uri(place)
    assert not re.search("s3|cr3t|1234", str(e.value).replace("s3://", ""))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("http://host/a/rows.jsonl?X-Amz-Signature=x/y", "rows.jsonl"),
        ("http://host/a/rows/?x", "rows"),
        ("http://host:80/?x", "host:80"),
        ("/data/what?.jsonl", "what?.jsonl"),
        ("rows.jsonl", "rows.jsonl"),
    ],
)
def test_a_place_is_named_by_its_path_alone(place: str, name: str) -> None:
    assert base_name(place) == name


def test_a_text_loses_the_secrets_of_all_its_urls_and_nothing_else() -> None:
    said = "403, message='Forbidden', url='http://host/a.jsonl?sig=s3cr3t', then s3://k:s3cr3t@b/c (why? a=b); rows.jsonl?sig=s3cr3t"
    assert (
        redact_text(said)
        == "403, message='Forbidden', url='http://host/a.jsonl', then s3://b/c (why? a=b); rows.jsonl"
    )


class StrangeError(Exception):
    """As a store's client may raise it."""


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
def test_an_error_of_a_store_comes_out_without_secrets(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="http://host/x") as e, redact_secrets():
        raise error
    assert type(e.value) is kind
    assert "s3cr3t" not in "".join(traceback.format_exception(e.value))


def fail(cause: Exception) -> None:
    raise StrangeError("told") from cause


def test_an_error_keeps_its_class_and_its_cause_unless_that_holds_secrets() -> None:
    causes = KeyError("plain"), KeyError(URL)
    for cause in causes:
        with pytest.raises(StrangeError, match="told") as e, redact_secrets():
            fail(cause)
        assert ("KeyError" in "".join(traceback.format_exception(e.value))) == (cause is causes[0])
