"""prepare: source rows to token shards."""

import json
from dataclasses import asdict
from pathlib import Path

from flytekit import Cache, Deck, dynamic, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.uris import redact
from workflows.flyte import store
from workflows.flyte.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.flyte.pods import DATA, DECK, DYNAMIC, HUB, LIGHT, data_pod, on_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.run_dir import path_for_reader, run_dir, write_data_report
from workflows.flyte.stage import recoverable, stage
from workflows.flyte.terminal import data_text
from workflows.tasks.describe_rows import describe_rows


@task(cache=Cache(version="6", ignored_inputs=("target", "recipe")), **DATA, **DECK, **HUB)
@stage
def prepare_data(
    prompts_digest: str,
    source_versions: list[str],
    heldout_digest: str,
    target: Target,
    target_digest: str,
    data: DataConfig,
    regenerate: bool,
    recipe: Recipe,
) -> PreparedData:
    """Tokenize all rows; with `regenerate` they are prompts that wait for the target, else their own answers
    are trained on.

    The cache key has `data`, without URIs, and `source_versions`, of data.sources and then of data.excluded;
    `recipe.data` has the URIs.
    """
    from eagle3.data.prepare import PreparedFile, prepare_shards
    from eagle3.data.sources import pin_sources
    from eagle3.reports.data import render_report

    store.share_credentials()
    out = store.new_dir("prepare_data")
    given = recipe.data
    pinned = pin_sources([*given.sources, *given.excluded], source_versions)
    sources = pinned[: len(given.sources)]
    excluded = pinned[len(given.sources) :]
    if recipe.prompts:
        sources = [SourceConfig(path=store.fetch(recipe.prompts), name="train"), *sources]
    heldout = SourceConfig(path=store.fetch(recipe.heldout), name="heldout")
    cfg = given.model_copy(update={"sources": sources, "excluded": excluded})
    files = prepare_shards(heldout, target.directory.download(), cfg, regenerate, str(out))

    def shard(index: int, file: PreparedFile) -> TokenShard:
        return TokenShard(index, FlyteFile(str(file.path)), **asdict(file.summary))

    report = out / "report.json"
    report.write_text(json.dumps(files.report, indent=1))
    Deck("Data", render_report(files.report))
    return PreparedData(
        shards=[shard(i, file) for i, file in enumerate(files.shards)],
        tool_tasks=[shard(i, file) for i, file in enumerate(files.tool_tasks)],
        heldout=shard(0, files.heldout),
        report=FlyteFile(str(report)),
    )


prepare_data_node = on_pod(prepare_data, data_pod)


@dynamic(**DYNAMIC)
@recoverable
def report_data(data: PreparedData, target: Target, init_from: str, recipe: Recipe) -> PreparedData:
    """Show what was prepared. Rows with answers are counted by token, so that the draft vocabulary can be
    judged."""
    answered = [shard for shard in [*data.shards, *data.tool_tasks] if shard.supervised_tokens]
    described = None
    if answered and not init_from:
        shards = TokenShards(answered, store.digest_of_digests(shard.digest for shard in answered))
        described = describe_rows(
            shards=shards, shards_digest=shards.digest, target=target, target_digest=target.digest
        )
    return show_data(data=data, described=described, init_from=init_from, recipe=recipe)


@task(**LIGHT, **DECK)
@recoverable
def show_data(
    data: PreparedData, described: FlyteDirectory | None, init_from: str, recipe: Recipe
) -> PreparedData:
    """Write data.html and data.json: into runs/<run_name> here, into an output directory with a Deck in a
    pod."""
    from eagle3.data.describe import measure_coverage, read_description
    from eagle3.vocab import most_frequent

    report = json.loads(Path(data.report.download()).read_text())
    if described:
        rows = read_description(described.download())
        chosen = most_frequent(rows.total, recipe.vocab.size, rows.end_of_turn_ids)
        report["vocab"] = measure_coverage(rows, chosen)
    if init_from:
        report["vocab_note"] = (
            f"The draft of train.init_from, {redact(init_from)}, has its own vocabulary: "
            "see the report of the run."
        )
    page = path_for_reader(write_data_report(run_dir(recipe.run_name), report))
    shards = [*data.shards, *data.tool_tasks]
    shards_dir = store.location(shards[0].file).rpartition("/")[0]
    print(data_text(report, len(shards), shards_dir, page), flush=True)
    return data
