"""The whole chain as one workflow: prompts and a target in, a draft that vLLM loads and its measurement out.

    resolve_inputs -> fetch_target -> prepare_data -> regenerate_responses -> collect_agent_traces
    collect_agent_traces -> build_vocab           -> train_draft -> export_draft -> evaluate_draft -> summarize_run
                         \\> extract_hidden_states /

Every stage is cached by the content of what it reads (`*_digest`) and its own settings; paths and replicas are in no key.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config import (
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
    TrainConfig,
    VocabConfig,
)
from eagle3.resources import ResourcesConfig
from workflows.tasks.build_vocab import build_vocab
from workflows.tasks.collect_agent_traces import collect_agent_traces
from workflows.tasks.describe_rows import describe_rows
from workflows.tasks.evaluate_draft import evaluate_draft_node
from workflows.tasks.export_draft import export_draft
from workflows.tasks.extract_hidden_states import extract_hidden_states
from workflows.tasks.fetch_target import fetch_target_node
from workflows.tasks.prepare_data import prepare_data_node
from workflows.tasks.regenerate_responses import regenerate_responses
from workflows.tasks.resolve_inputs import resolve_inputs
from workflows.tasks.summarize_run import summarize_run
from workflows.tasks.train_draft import train_draft_node


@workflow
def train_eagle3(
    heldout: FlyteFile,
    target: TargetConfig,
    prompts: FlyteFile | None = None,
    engine: EngineConfig = EngineConfig(),
    data: DataConfig = DataConfig(),
    regenerate: RegenerateConfig = RegenerateConfig(),
    vocab: VocabConfig = VocabConfig(),
    extract: ExtractConfig = ExtractConfig(),
    train: TrainConfig = TrainConfig(),
    export: ExportConfig = ExportConfig(),
    evaluate: EvaluateConfig = EvaluateConfig(),
    fanout: FanOutConfig = FanOutConfig(),
    resources: ResourcesConfig = ResourcesConfig(),
    run_name: str = "train_eagle3",
) -> FlyteDirectory:
    """Train, export and measure an EAGLE-3 draft for a target on the target's own answers."""
    found = resolve_inputs(
        prompts=prompts,
        heldout=heldout,
        target=target,
        engine=engine,
        data=data,
        regenerate=regenerate,
        evaluate=evaluate,
        train=train,
    )
    model = fetch_target_node(target=target, ref=found.target, target_digest=found.target.digest, resources=resources)
    prepared = prepare_data_node(
        prompts=prompts,
        prompts_digest=found.prompts_digest,
        source_versions=found.source_versions,
        heldout=heldout,
        heldout_digest=found.heldout_digest,
        target=model,
        target_digest=found.target.digest,
        data=data,
        regenerate=found.regenerate,
        resources=resources,
    )
    chats = regenerate_responses(
        data=prepared,
        target=model,
        engine=engine,
        regenerate=regenerate,
        vocab=vocab,
        init_from=found.init_from,
        init_digest=found.init_digest,
        extract=extract,
        fanout=fanout,
        resources=resources,
    )
    rows = collect_agent_traces(
        data=prepared, chats=chats, target=model, engine=engine, regenerate=regenerate, fanout=fanout, resources=resources
    )
    draft_vocab = build_vocab(
        shards=rows,
        shards_digest=rows.digest,
        target=model,
        target_digest=found.target.digest,
        vocab=vocab,
        init_from=found.init_from,
        init_digest=found.init_digest,
    )
    states = extract_hidden_states(shards=rows, target=model, engine=engine, extract=extract, fanout=fanout, resources=resources)
    checkpoint = train_draft_node(
        states=states,
        states_digest=states.digest,
        vocab=draft_vocab,
        vocab_digest=draft_vocab.digest,
        target=model,
        target_digest=found.target.digest,
        init_from=found.init_from,
        init_digest=found.init_digest,
        train=train,
        resources=resources,
    )
    draft = export_draft(
        checkpoint=checkpoint,
        checkpoint_digest=checkpoint.digest,
        vocab=draft_vocab,
        vocab_digest=draft_vocab.digest,
        target=model,
        target_digest=found.target.digest,
        public_name=found.public_name,
        export=export,
    )
    evaluation = evaluate_draft_node(
        draft=draft,
        draft_digest=draft.digest,
        heldout=prepared.heldout,
        heldout_digest=prepared.heldout.digest,
        target=model,
        target_digest=found.target.digest,
        engine=engine,
        evaluate=evaluate,
        resources=resources,
    )
    described = describe_rows(shards=rows, shards_digest=rows.digest, target=model, target_digest=found.target.digest)
    return summarize_run(
        run_name=run_name,
        found=found,
        model=model,
        prepared=prepared,
        rows=rows,
        described=described,
        draft_vocab=draft_vocab,
        states=states,
        checkpoint=checkpoint,
        draft=draft,
        evaluation=evaluation,
        target=target,
        engine=engine,
        data=data,
        regenerate=regenerate,
        vocab=vocab,
        extract=extract,
        train=train,
        export=export,
        evaluate=evaluate,
        fanout=fanout,
    )
