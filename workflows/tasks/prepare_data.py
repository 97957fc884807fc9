"""prepare: source rows to token shards."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import cast

from flytekit import Cache, Deck, dynamic, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

import images
from eagle3.config.data import DataConfig, SourceConfig, VocabConfig
from eagle3.config.resources import ResourcesConfig
from eagle3.uris import redact
from workflows.flyte import store
from workflows.flyte.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.flyte.pods import DATA, DYNAMIC, HUB, LIGHT, data_pod
from workflows.flyte.run_dir import path_for_reader, run_dir, write_data_report
from workflows.flyte.stage import recoverable, stage
from workflows.flyte.terminal import data_text
from workflows.tasks.describe_rows import describe_rows


@task(
    container_image=images.CPU,
    cache=Cache(version="5", ignored_inputs=("prompts", "heldout", "target", "given")),
    retries=2,
    enable_deck=True,
    deck_fields=(),
    **DATA,
    **HUB,
)
@stage
def prepare_data(
    prompts: FlyteFile | None,
    prompts_digest: str,
    source_versions: list[str],
    heldout: FlyteFile,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    given: DataConfig,
    data: DataConfig,
    regenerate: bool,
) -> PreparedData:
    """Tokenize all rows; with `regenerate` they are prompts that wait for the target, else their own answers are trained on.

    `given` says where the sources lie; in the cache key stand `data`, the same without the places, and `source_versions`, those
    of given.sources and given.excluded in order.
    """
    from eagle3.data.prepare import PreparedFile, prepare_shards
    from eagle3.data.sources import pin_sources
    from eagle3.reports.data import render_report

    store.share_credentials()
    out = store.new_dir("prepare_data")
    pinned = pin_sources([*given.sources, *given.excluded], source_versions)
    sources, excluded = pinned[: len(given.sources)], pinned[len(given.sources) :]
    if prompts:
        sources = [SourceConfig(path=store.fetch(prompts), name="train"), *sources]
    heldout_source = SourceConfig(path=store.fetch(heldout), name="heldout")
    cfg = given.model_copy(update={"sources": sources, "excluded": excluded})
    files = prepare_shards(heldout_source, target.directory.download(), cfg, regenerate, str(out))

    def shard(index: int, file: PreparedFile) -> TokenShard:
        return TokenShard(index, FlyteFile(str(file.path)), **asdict(file.summary))

    shards, tool_tasks = (
        [shard(i, file) for i, file in enumerate(made)] for made in (files.shards, files.tool_tasks)
    )
    report = out / "report.json"
    report.write_text(json.dumps(files.report, indent=1))
    Deck("Data", render_report(files.report))
    return PreparedData(shards, tool_tasks, shard(0, files.heldout), FlyteFile(str(report)))


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def report_data(
    run_name: str, data: PreparedData, target: Target, vocab: VocabConfig, init_from: str
) -> PreparedData:
    """Show what was prepared; rows that have answers already are counted by token, so that the draft vocabulary can be judged."""
    answered = [shard for shard in [*data.shards, *data.tool_tasks] if shard.supervised_tokens]
    described = None
    if answered and not init_from:
        shards = TokenShards(answered, store.digest_of_digests(shard.digest for shard in answered))
        described = describe_rows(
            shards=shards, shards_digest=shards.digest, target=target, target_digest=target.digest
        )
    return cast(
        PreparedData,
        show_data(run_name=run_name, data=data, described=described, vocab=vocab, init_from=init_from),
    )


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def prepare_data_node(
    prompts: FlyteFile | None,
    prompts_digest: str,
    source_versions: list[str],
    heldout: FlyteFile,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    data: DataConfig,
    regenerate: bool,
    resources: ResourcesConfig,
) -> PreparedData:
    """prepare_data on the pod that the recipe asks for."""
    from eagle3.data.sources import without_paths

    node = data_pod(resources).node(
        prepare_data,
        prompts=prompts,
        prompts_digest=prompts_digest,
        source_versions=source_versions,
        heldout=heldout,
        heldout_digest=heldout_digest,
        target=target,
        target_digest=target_digest,
        given=data,
        data=without_paths(data),
        regenerate=regenerate,
    )
    return cast(PreparedData, node)


@task(container_image=images.CPU, retries=2, enable_deck=True, deck_fields=(), **LIGHT)
@recoverable
def show_data(
    run_name: str, data: PreparedData, described: FlyteDirectory | None, vocab: VocabConfig, init_from: str
) -> PreparedData:
    """Write data.html and data.json: into runs/<run_name> here, into an output directory with a Deck in a pod."""
    from eagle3.data.describe import measure_coverage, read_description
    from eagle3.vocab import most_frequent

    report = json.loads(Path(data.report.download()).read_text())
    if described:
        description = read_description(described.download())
        report["vocab"] = measure_coverage(
            description, most_frequent(description.total, vocab.size, description.end_of_turn_ids)
        )
    if init_from:
        report["vocab_note"] = (
            f"The draft of train.init_from, {redact(init_from)}, brings its own vocabulary: see the report of the run."
        )
    page = path_for_reader(write_data_report(run_dir(run_name), report))
    shards = [*data.shards, *data.tool_tasks]
    shards_dir = store.location(shards[0].file).rpartition("/")[0]
    print(data_text(report, len(shards), shards_dir, page), flush=True)
    return data
