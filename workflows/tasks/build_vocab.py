"""vocab: which target tokens the draft can say."""

from flytekit import Cache, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config import VocabConfig
from workflows import store
from workflows.interfaces import DraftVocab, Target, TokenShards
from workflows.resources import DATA
from workflows.stage import stage


@task(container_image=images.CPU, cache=Cache(version="1", ignored_inputs=("shards", "target")), **DATA)
@stage
def build_vocab(shards: TokenShards, shards_digest: str, target: Target, target_digest: str, vocab: VocabConfig) -> DraftVocab:
    from eagle3.shards import read_token_shard
    from eagle3.target.properties import end_of_turn_ids
    from eagle3.vocab import build_vocab, count_tokens, save_vocab

    rows = (row for shard in shards.shards for row in read_token_shard(shard.file.download()))
    built = build_vocab(count_tokens(rows, target.vocab_size), vocab.size, end_of_turn_ids(target.directory.download()))
    path = store.new_dir("build_vocab") / "vocab.safetensors"
    return DraftVocab(FlyteFile(str(path)), vocab.size, built.coverage, save_vocab(path, built))
