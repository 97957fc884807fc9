"""Places, paths and URLs alike: what of one may be shown, what it is called, and which are refused.

A URL can hold secrets: user and password before its host, a signature or token in its query. With the former a place is refused
wherever a recipe names it. The latter is how pre-signed URLs work: it is used for reading, and stands in no key, message or file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

# Before an HTTP host a token may stand alone; in other URLs a name without a password is a login, or a container of Azure's.
# A password with a slash in it ends the host too early: what stands behind its colon is no port then.
_USER = re.compile(
    r"(?i:(?<=http://)|(?<=https://))[^/?#\s]*@|(?<=://)[^/?#@:\s\[\]]*:(?!:|\d*(?:[/?#\s]|$))(?:[^/?#\s]*@|\S*@)"
)
# In words of others an address may be cut: a query is known by its URL, or by its own look.
_QUERY = re.compile(r"(://[^\s'\"<>?#]*)[?#][^\s'\"<>]*|[?#][\w.~%+-]+=[^\s'\"<>]*")


def redact(place: str) -> str:
    """The place as it may be shown: a URL without user, password, query and fragment, a path as it is."""
    return re.split("[?#]", _USER.sub("", place), maxsplit=1)[0] if "://" in place else place


def base_name(place: str) -> str:
    """The last part of its path; the host of a URL without one."""
    return redact(place).rstrip("/").rpartition("/")[2]


def redact_text(text: str) -> str:
    """A text with all URLs in it as they may be shown."""
    return _QUERY.sub(r"\1", _USER.sub("", text))


def check_uri(place: str) -> str:
    """The place itself.

    Raises:
        ValueError: if it carries credentials. Of such a place no part is shown: where they end is not always clear.
    """
    if _USER.search(place):
        scheme = place.partition("://")[0]
        raise ValueError(
            f"a URL must carry no user, password or token before its host, got one of {scheme}:// (not shown further); give a "
            "store's credentials by its environment variables or the pods' service account, a server's key by EAGLE3_SERVER_KEY "
            "(in a cluster by the secret that EAGLE3_SERVER_SECRET names)"
        )
    return place


def may_be_hub_id(name: str) -> bool:
    """Whether a name reads like a hub id (org/model), and not like a path or URL."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    return bool(name) and not is_path and not name.endswith(".gguf")


def uri_kind(name: str) -> Literal["hub", "path", "url"]:
    """Whether a name is a hub id, a local path or a URL. A file or directory of that name takes precedence over a hub id."""
    if "://" in name:
        return "url"
    return "hub" if may_be_hub_id(name) and not Path(name).expanduser().exists() else "path"


@contextmanager
def redact_secrets() -> Iterator[None]:
    """Let no exception out whose words, or those of what caused it, hold what may not be shown; also a decorator.

    Stores and their clients put whole URLs into their messages.

    Raises:
        ConnectionError, FileNotFoundError, ValueError, OSError: in place of such an exception, as near to it as can be.
    """
    try:
        yield
    except Exception as e:
        told = redact_text(str(e))
        if told != str(e):
            raise _kind(e)(told if type(e) is _kind(e) else f"{type(e).__name__}: {told}") from None
        if any(redact_text(str(cause)) != str(cause) for cause in _causes(e)):
            raise e from None
        raise


def _kind(error: Exception) -> type[Exception]:
    if isinstance(error, TimeoutError):
        return ConnectionError
    return next(
        (kind for kind in (ConnectionError, FileNotFoundError, ValueError) if isinstance(error, kind)),
        OSError,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (
        cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        yield cause
        error = cause
