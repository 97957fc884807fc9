"""vocab: the target tokens that the draft can propose."""

import json
import logging
import tempfile
from pathlib import Path

from flytekit import Cache, task
from flytekit.types.file import FlyteFile

from eagle3.config.data import VocabConfig
from workflows.flyte import store
from workflows.flyte.interfaces import DraftVocab, Target, TokenShards
from workflows.flyte.pods import DATA, HUB
from workflows.flyte.stage import stage

logger = logging.getLogger("eagle3")


@task(cache=Cache(version="2", ignored_inputs=("shards", "target", "init_from")), **DATA, **HUB)
@stage
def build_vocab(
    shards: TokenShards,
    shards_digest: str,
    target: Target,
    target_digest: str,
    vocab: VocabConfig,
    init_from: str,
    init_digest: str,
) -> DraftVocab:
    """Take the most frequent tokens, or keep the vocabulary of the draft that training starts from."""
    from eagle3.draft.initial import check_initial, fetch_initial
    from eagle3.draft.speculators import read_config, read_target_ids
    from eagle3.shards.tokens import read_token_shard
    from eagle3.targets.properties import end_of_turn_ids
    from eagle3.vocab import build_vocab, count_tokens, keep_vocab, save_vocab

    target_dir = Path(target.directory.download())
    out = store.new_dir("build_vocab")
    counts = count_tokens(
        (row for shard in shards.shards for row in read_token_shard(shard.file.download())), target.vocab_size
    )
    if init_digest:
        store.share_credentials()
        target_config = json.loads((target_dir / "config.json").read_text())
        with tempfile.TemporaryDirectory() as draft_dir:
            fetch_initial(init_from, init_digest, target_config, draft_dir)
            config = read_config(draft_dir)
            check_initial(draft_dir, target_config, config["eagle_aux_hidden_state_layer_ids"])
            built = keep_vocab(counts, read_target_ids(draft_dir, config["draft_vocab_size"]))
        if vocab.size not in (len(built.d2t), VocabConfig().size):
            logger.warning(
                "vocab.size %d is ignored: the initial draft has %d tokens", vocab.size, len(built.d2t)
            )
    else:
        built = build_vocab(counts, vocab.size, end_of_turn_ids(target_dir))
    path = out / "vocab.safetensors"
    return DraftVocab(FlyteFile(str(path)), len(built.d2t), built.coverage, save_vocab(path, built))
