"""The target as one directory: config, tokenizer, safetensors."""

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config import TargetConfig
from workflows import store
from workflows.interfaces import Target, TargetRef
from workflows.resources import DATA
from workflows.stage import stage


@task(container_image=images.CPU, cache=Cache(version="3", ignored_inputs=("target", "ref")), retries=2, **DATA)
@stage
def fetch_target(target: TargetConfig, ref: TargetRef, target_digest: str) -> Target:
    from eagle3.target.resolve import fetch_target
    from eagle3.target.trust import distrust
    from eagle3.target.weights import check_target_dir

    out = store.new_dir("target")
    fetch_target(target.model_copy(update={"revision": ref.revision}), str(out))  # the commit that the digest stands for
    distrust(out)
    config = check_target_dir(out)
    return Target(
        name=ref.name,
        revision=ref.revision,
        digest=target_digest,
        directory=FlyteDirectory(str(out)),
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
    )
