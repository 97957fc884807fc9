"""The cluster's storage: moto's S3 inside this process, with one bucket that reports each stored object."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from google.protobuf.message import Message
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

BUCKET = "flyte"
KEY_ID, SECRET, REGION = "minio", "miniostorage", "us-east-1"
UNAVAILABLE = b"<Error><Code>ServiceUnavailable</Code><Message>Service Unavailable</Message></Error>"
M = TypeVar("M", bound=Message)


class ObjectStore:
    """An empty S3 store.

    puts: keys in the order of storing. on_put: called with each key after its object is stored and before the writer
    gets its answer. refuses: called with each key that is read; True makes the answer 503.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.puts: list[str] = []
        self.on_put: Callable[[str], None] = lambda key: None
        self.refuses: Callable[[str], bool] = lambda key: False
        # moto seeks in an object's file to compute its ETag without a lock: a reader would get a part of the object.
        self._one_at_a_time = threading.Lock()
        self._serve_s3 = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.s3: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(
                signature_version="s3v4"
            ),  # an older signature would cover headers that the uploader adds
        )
        buckets = [bucket["Name"] for bucket in self.s3.list_buckets()["Buckets"]]
        assert BUCKET not in buckets, (
            "every server in this process shows the same buckets: close the other store first"
        )
        self.s3.create_bucket(Bucket=BUCKET)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        if environ["REQUEST_METHOD"] == "GET" and bucket == BUCKET and self.refuses(key):
            start_response("503 Service Unavailable", [("Content-Length", str(len(UNAVAILABLE)))])
            return [UNAVAILABLE]
        with self._one_at_a_time:
            answer: Iterable[bytes] = self._serve_s3(environ, start_response)
        if environ["REQUEST_METHOD"] == "PUT" and bucket == BUCKET and key:
            self.puts.append(key)
            self.on_put(key)
        return answer

    def keys(self, part: str) -> list[str]:
        """Keys that contain `part`, sorted."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return sorted(
            item["Key"] for page in pages for item in page.get("Contents", []) if part in item["Key"]
        )

    def read(self, key: str) -> bytes | None:
        """The content of an object, by key or URL; None if there is none."""
        key = key.removeprefix(f"s3://{BUCKET}/")
        try:
            return bytes(self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        except self.s3.exceptions.NoSuchKey:
            return None

    def read_message(self, key: str, kind: type[M]) -> M | None:
        """A protobuf message; None if there is none."""
        content = self.read(key)
        return None if content is None else kind.FromString(content)

    def write(self, key: str, content: bytes) -> str:
        """Store an object; returns its URL."""
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def write_message(self, key: str, message: Message) -> None:
        self.write(key, message.SerializeToString())

    def delete(self, part: str) -> None:
        """Delete every object whose key contains `part`."""
        for key in self.keys(part):
            self.s3.delete_object(Bucket=BUCKET, Key=key)

    def environment(self) -> dict[str, str]:
        """The variables by which flytekit finds the store."""
        return {
            "FLYTE_AWS_ENDPOINT": self.url,
            "FLYTE_AWS_ACCESS_KEY_ID": KEY_ID,
            "FLYTE_AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
        }

    def close(self) -> None:
        """Remove the bucket, for the next store in this process, and stop."""
        self.delete("")
        self.s3.delete_bucket(Bucket=BUCKET)
        self._server.shutdown()
