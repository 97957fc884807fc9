"""The process that holds the engine: reads one JSON request a line from stdin, answers with one line on the real stdout.

Importing vLLM costs 12 s, building an engine 7 s, and only a process that ends gives all memory back. So this process imports
once and forks a child for each engine; the child takes over both pipes until it is told to stop. Requests: {"op": "start",
"settings"}, then any number of "generate", "play", "capture" and "reset", then "stop". Replies: {"result"}, {"error"} or, with an
exit status, {"died"}; before it any number of {"progress"}.
"""

import gc
import json
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from eagle3.engine.process import error_reply, forks_engines
from eagle3.engine.progress import Progress, Report
from eagle3.regenerate.answers import Sampling

# Collections during the import cost 3 of 15 s; what it made stays for good, so later collections may skip it.
gc.disable()


def main(library: str) -> None:
    """Serve engines of one library, "vllm", "transformers" or "httpx" (servers), one after the other, until stdin closes."""
    replies = _claim_stdout()
    _import(library)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork() if forks_engines() else 0
        if child == 0:
            _serve(request["settings"], replies)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            _reply(replies, {"died": status})
            return
        _reply(replies, {"result": None})


def _claim_stdout() -> TextIO:
    """Keep the pipe for replies and send everything that libraries print to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _import(library: str) -> None:
    if library == "transformers":
        import eagle3.engine.reference

        return
    if library == "httpx":
        import eagle3.engine.server.engine

        return
    import vllm
    import vllm.v1.worker.gpu_worker  # noqa: F401

    import eagle3.engine.vllm_engine  # noqa: F401


def _serve(settings: dict[str, Any], replies: TextIO) -> None:
    """Build one engine and answer requests; never returns."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    engine: Any = None
    request: dict[str, Any] = {"op": "start"}
    while request["op"] != "stop":
        try:
            if request["op"] == "start":
                engine, result = _build(settings), None
            else:
                with Report(_teller(replies)) as report:
                    result = _answer(engine, request, report)
            _reply(replies, {"result": result})
        except Exception as e:
            traceback.print_exc()
            _reply(replies, error_reply(e))
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
    # Past exit handlers: the engine's own tear-down costs a second and frees nothing that the kernel does not.
    os._exit(0)


def _exit_with_parent() -> None:
    """End at once when the other end of stdin is gone, even in the middle of a job: nobody waits for the result."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os._exit(1)


def _build(settings: dict[str, Any]) -> Any:
    if settings["server_url"]:
        from eagle3.engine.server.engine import ServerEngine

        return ServerEngine(settings)
    if settings["engine"]["engine"] == "transformers":
        from eagle3.engine.reference import ReferenceEngine

        return ReferenceEngine(settings)
    from eagle3.engine.vllm_engine import VllmEngine

    return VllmEngine(settings)


def _answer(engine: Any, request: dict[str, Any], report: Report) -> Any:
    if request["op"] == "generate":
        report.begin(len(request["prompts"]), "answers", lambda: report.conversations)
        sampling = dict(request["sampling"])
        seed = sampling.pop("seed")
        return engine.generate(request["prompts"], Sampling(**sampling), seed, report)
    if request["op"] == "reset":
        return engine.reset()
    return _play(engine, request, report) if request["op"] == "play" else _capture(engine, request, report)


def _play(engine: Any, request: dict[str, Any], report: Report) -> dict[str, Any]:
    from eagle3.config.engine import RegenerateConfig
    from eagle3.regenerate.answer_log import AnswerLog
    from eagle3.regenerate.generator import AnswerGenerator
    from eagle3.shards.tokens import read_token_shard, summarise_rows, write_token_shard

    cfg = RegenerateConfig(**request["regenerate"])
    with AnswerLog(request["log_place"]) as log:
        rows = read_token_shard(request["token_shard_path"])
        player = AnswerGenerator(rows, engine.target_dir, cfg, request["max_model_len"], log)
        requests = player.start()
        report.begin(player.num_turns, "user turns", lambda: player.num_turns_done)
        if requests:
            engine.play(requests, player.follow, cfg.seed, report)
    answered, counts = player.result()
    summary = write_token_shard(request["out"], answered) if answered else summarise_rows([])
    return {**asdict(summary), "counts": counts}


def _capture(engine: Any, request: dict[str, Any], report: Report) -> dict[str, Any]:
    from eagle3.config.engine import ExtractConfig
    from eagle3.engine.capture import CAPTURE_VERSION, ShardSink
    from eagle3.shards.tokens import read_token_shard

    rows, layer_ids = read_token_shard(request["token_shard_path"]), request["layer_ids"]
    info = {
        **request["info"],
        **engine.describe(),
        "layer_ids": layer_ids,
        "capture_version": CAPTURE_VERSION,
    }
    extract = ExtractConfig(**request["extract"])
    sink = ShardSink(rows, request["out"], len(layer_ids), extract, info, engine.target_dir, engine.dtype)
    wanted_rows = [rows[i] for i in sink.wanted]
    total, wanted = (sum(len(row.token_ids) for row in some) for some in (rows, wanted_rows))
    report.begin(total, "tokens", lambda: total - wanted + report.tokens)

    def add(i: int, *found: Any) -> None:
        sink.add(sink.wanted[i], *found)
        report.add(len(wanted_rows[i].token_ids), 1)
        report.tell()

    try:
        cached_tokens = engine.capture(wanted_rows, layer_ids, add)
        return {"manifest": sink.close(), "cached_tokens": cached_tokens}
    finally:
        sink.writer.stop()


def _teller(replies: TextIO) -> Callable[[Progress], None]:
    """What sends a Progress where the pipe has room for it: a parent that reads nothing for a while must not stop the engine.

    A pipe takes a line of this length as a whole, so it never ends in the middle and never waits.
    """
    fd = replies.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLOUT)

    def tell(progress: Progress) -> None:
        line = (json.dumps({"progress": asdict(progress)}) + "\n").encode()
        assert len(line) <= select.PIPE_BUF
        # Hung up: the parent is gone, and this process ends.
        if any(events == select.POLLOUT for _, events in poll.poll(0)):
            os.write(fd, line)

    return tell


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
