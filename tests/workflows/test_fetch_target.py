"""The commit that keys the cache is the commit that is fetched, however the branch moves in between."""

import json
from pathlib import Path

import pytest

from eagle3.config.engine import TargetConfig
from eagle3.targets import resolve
from tests.helpers.flyte_runs import make_recipe
from workflows.flyte.interfaces import TargetRef
from workflows.tasks.fetch_target import fetch_target


def test_a_hub_target_is_fetched_at_the_commit_behind_its_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched = []

    def fetch(cfg: TargetConfig, out_dir: str) -> None:
        fetched.append(cfg.revision)
        config = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 7, "hidden_size": 5}
        Path(out_dir, "config.json").write_text(json.dumps(config))
        Path(out_dir, "model.safetensors").touch()

    monkeypatch.setattr(resolve, "fetch_target", fetch)
    monkeypatch.setenv("EAGLE3_STORE", str(tmp_path))
    ref = TargetRef("org/model", "0123abc", "digest")
    target = fetch_target.task_function(
        ref=ref, target_digest="digest", recipe=make_recipe(target={"name": "org/model", "revision": "main"})
    )
    assert fetched == ["0123abc"]
    assert (target.revision, target.num_layers, target.vocab_size, target.hidden_size) == ("0123abc", 3, 7, 5)
