"""The target as one directory: config, tokenizer, safetensors; or without its weights, where they are not needed."""

from pathlib import Path
from typing import Any, cast

from flytekit import Cache, dynamic, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config.engine import TargetConfig
from eagle3.config.resources import ResourcesConfig
from workflows.flyte import store
from workflows.flyte.interfaces import Target, TargetRef
from workflows.flyte.pods import DATA, DYNAMIC, HUB, LIGHT, data_pod
from workflows.flyte.stage import recoverable, stage


@task(
    container_image=images.CPU,
    cache=Cache(version="3", ignored_inputs=("target", "ref")),
    retries=2,
    **DATA,
    **HUB,
)
@stage
def fetch_target(target: TargetConfig, ref: TargetRef, target_digest: str) -> Target:
    from eagle3.targets.resolve import fetch_target
    from eagle3.targets.trust import sanitize
    from eagle3.targets.weights import check_target_dir

    store.share_credentials()
    out = store.new_dir("target")
    fetch_target(
        target.model_copy(update={"revision": ref.revision}), str(out)
    )  # the commit that the digest stands for
    sanitize(out)
    return _as_target(ref, target_digest, out, check_target_dir(out))


@task(
    container_image=images.CPU,
    cache=Cache(version="2", ignored_inputs=("target", "ref")),
    retries=2,
    **LIGHT,
    **HUB,
)
@stage
def fetch_tokenizer(target: TargetConfig, ref: TargetRef, target_digest: str) -> Target:
    """The same target, its directory without weights: enough to prepare the data and to plan a run."""
    from eagle3.targets.resolve import fetch_tokenizer
    from eagle3.targets.trust import sanitize
    from eagle3.targets.weights import check_target_config, read_config

    store.share_credentials()
    out = store.new_dir("tokenizer")
    fetch_tokenizer(target.model_copy(update={"revision": ref.revision}), str(out))
    sanitize(out)
    config = read_config(out, ref.name)
    check_target_config(config, ref.name)
    return _as_target(ref, target_digest, out, config)


def _as_target(ref: TargetRef, target_digest: str, directory: Path, config: dict[str, Any]) -> Target:
    return Target(
        name=ref.name,
        revision=ref.revision,
        digest=target_digest,
        directory=FlyteDirectory(str(directory)),
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
    )


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def fetch_target_node(
    target: TargetConfig, ref: TargetRef, target_digest: str, resources: ResourcesConfig
) -> Target:
    """fetch_target on the pod that the recipe asks for."""
    return cast(
        Target, data_pod(resources).node(fetch_target, target=target, ref=ref, target_digest=target_digest)
    )
