"""URIs, that is paths, URLs and hub ids: print them without secrets, tell their kind and name, refuse some.

A URL can hold secrets: user and password before its host, a signature or token in its query. A recipe must
not name a URL of the first kind. Pre-signed URLs are of the second kind: the query is used for reading and is
in no key, message or file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

# In an HTTP URL a token without a password counts too. In others a name alone is a login, or a container of
# Azure's. A password with a slash ends the host too early; then the text after the colon is no port.
_USER = re.compile(
    r"(?i:(?<=http://)|(?<=https://))[^/?#\s]*@"
    r"|(?<=://)[^/?#@:\s\[\]]*:(?!:|\d*(?:[/?#\s]|$))(?:[^/?#\s]*@|\S*@)"
)
# A message of a library may contain half a URL: a query is recognized after a URL, or by its own form.
_QUERY = re.compile(r"(://[^\s'\"<>?#]*)[?#][^\s'\"<>]*|[?#][\w.~%+-]+=[^\s'\"<>]*")


def redact(uri: str) -> str:
    """A URL without user, password, query and fragment; a path unchanged."""
    return re.split("[?#]", _USER.sub("", uri), maxsplit=1)[0] if "://" in uri else uri


def base_name(uri: str) -> str:
    """The last part of its path; the host of a URL without a path."""
    return redact(uri).rstrip("/").rpartition("/")[2]


def redact_text(text: str) -> str:
    """A text with all its URLs redacted."""
    return _QUERY.sub(r"\1", _USER.sub("", text))


def check_uri(uri: str) -> str:
    """Return the URI.

    Raises:
        ValueError: if it carries credentials; shows only the scheme, for their end is not always clear.
    """
    if _USER.search(uri):
        scheme = uri.partition("://")[0]
        raise ValueError(
            f"a URL must carry no user, password or token before its host, got one of {scheme}:// (not "
            "shown further); give a store's credentials by its environment variables or the pods' service "
            "account, a server's key by EAGLE3_SERVER_KEY (in a cluster by the secret that "
            "EAGLE3_SERVER_SECRET names)"
        )
    return uri


def may_be_hub_id(name: str) -> bool:
    """Whether a name reads like a hub id (org/model), and not like a path or URL."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    return bool(name) and not is_path and not name.endswith(".gguf")


def uri_kind(name: str) -> Literal["hub", "path", "url"]:
    """Whether a name is a hub id, a local path or a URL. If a file has the name, it is a path."""
    if "://" in name:
        return "url"
    return "hub" if may_be_hub_id(name) and not Path(name).expanduser().exists() else "path"


@contextmanager
def redact_secrets() -> Iterator[None]:
    """Redact the messages of exceptions and their causes, which may contain whole URLs; also a decorator.

    Raises:
        ConnectionError, FileNotFoundError, ValueError, OSError: the closest one to an error with a secret.
    """
    try:
        yield
    except Exception as e:
        text = redact_text(str(e))
        if text != str(e):
            raise _kind(e)(text if type(e) is _kind(e) else f"{type(e).__name__}: {text}") from None
        if any(redact_text(str(cause)) != str(cause) for cause in _causes(e)):
            raise e from None
        raise


def _kind(error: Exception) -> type[Exception]:
    if isinstance(error, TimeoutError):
        return ConnectionError
    kinds = (ConnectionError, FileNotFoundError, ValueError)
    return next((kind for kind in kinds if isinstance(error, kind)), OSError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield cause
        yield from _causes(cause)
