"""export: the directory that vLLM loads."""

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from eagle3.config.training import ExportConfig
from workflows.flyte import store
from workflows.flyte.interfaces import DraftCheckpoint, DraftExport, DraftVocab, Target
from workflows.flyte.pods import DATA
from workflows.flyte.stage import stage


@task(cache=Cache(version="1", ignored_inputs=("checkpoint", "vocab", "target")), **DATA)
@stage
def export_draft(
    checkpoint: DraftCheckpoint,
    checkpoint_digest: str,
    vocab: DraftVocab,
    vocab_digest: str,
    target: Target,
    target_digest: str,
    public_name: str,
    export: ExportConfig,
) -> DraftExport:
    from eagle3.export import write_export

    out = (
        store.new_dir("export_draft") / "eagle3"
    )  # vLLM guesses the method from the path where none is named
    draft_dir, target_dir = checkpoint.directory.download(), target.directory.download()
    digest = write_export(draft_dir, vocab.file.download(), target_dir, public_name, export, str(out))
    return DraftExport(FlyteDirectory(str(out)), digest)
