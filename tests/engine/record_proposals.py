"""Run by test_proposals.py as a process of its own: serves drafts and records what the engine proposes after every step.

Arguments: a prompts file (JSON), then one directory a variant, with target/ and export/. Each gets a proposals.json: a list of
[token ids so far, proposed token ids].
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input

from eagle3.config import EngineConfig
from eagle3.target.vllm_engine import VllmEngine

K, MAX_NEW_TOKENS = 4, 24


def record(directory: Path, prompts: list[list[int]]) -> None:
    engine_config = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    settings: dict[str, Any] = {
        "target_dir": str(directory / "target"),
        "engine": engine_config.model_dump(),
        "layer_ids": None,
        "draft_dir": str(directory / "export"),
        "num_speculative_tokens": K,
    }
    engine = VllmEngine(settings).engine
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), tokens_input(prompt), params)
    scheduler, proposals = engine.engine_core.engine_core.scheduler, []
    while engine.has_unfinished_requests():
        engine.step()
        proposals += [[list(r.all_token_ids), list(r.spec_token_ids)] for r in scheduler.requests.values() if r.spec_token_ids]
    (directory / "proposals.json").write_text(json.dumps(proposals))


if __name__ == "__main__":
    for variant in sys.argv[2:]:
        child = os.fork()  # one engine a process; the import is shared
        if child == 0:
            record(Path(variant), json.loads(Path(sys.argv[1]).read_text()))
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{variant} failed")
