"""Synthetic states, written for both trainers: the same tokens, loss masks, states, draft vocabulary and
target.

    target/           config.json; model.safetensors with embedding, final norm and head: read by both
    ours/             shard/ (eagle3/shards/tokens.py) and vocab.safetensors
    peer/             Arrow table: input_ids, loss_mask (0 or 1), seq_len; d2t-{K}.npy, t2d-{K}.npy
    peer/hidden_states/hs_{row}.safetensors   hidden_states [T, A + 1, H] (last: before the final norm);
                                              token_ids [T]

Every row has ROW_TOKENS tokens, so packs of a multiple of that are filled to the last token by any packer in
any order. A row is one prompt and one answer, as in a chat: the supervised tokens are one run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.shards.tokens import TokenRow
from eagle3.vocab import Vocab, build_vocab, save_vocab
from tests.helpers.shard_files import write_hidden_states

ROW_TOKENS = 1024
CHUNK_BYTES = 1 << 30  # all rows are shuffled together, so that no pack is left half full between chunks


@dataclass(frozen=True)
class Sizes:
    """Shape of a target, V `vocab`, H `hidden`, N `heads`, G `groups`, D `head_dim`, and K `draft_vocab`."""

    model_type: str
    hidden: int
    inner: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    draft_vocab: int
    layers: int

    @property
    def layer_ids(self) -> list[int]:
        """The three aux layers, in vLLM's numbering: 2, n // 2, n - 3."""
        return [2, self.layers // 2, self.layers - 3]


SMOLLM2 = Sizes("llama", 576, 1536, 9, 3, 64, 49152, 8192, 30)
QWEN3_8B = Sizes("qwen3", 4096, 12288, 32, 8, 128, 151936, 32000, 36)
TINY = Sizes("qwen3", 64, 96, 4, 2, 16, 512, 128, 8)


def make_rows(count: int, supervised: float, vocab: int) -> list[TokenRow]:
    """Rows whose last `supervised` share of tokens is the answer; ids follow Zipf's law, the lower the more
    frequent.
    """
    generator = torch.Generator().manual_seed(0)
    shares = 1.0 / (torch.arange(vocab) + 10.0)
    answer = round(ROW_TOKENS * supervised)
    mask = [t >= ROW_TOKENS - answer for t in range(ROW_TOKENS)]
    ids = torch.multinomial(shares, count * ROW_TOKENS, replacement=True, generator=generator).view(
        count, ROW_TOKENS
    )
    return [TokenRow(f"row-{i}", "synthetic", row, mask) for i, row in enumerate(ids.tolist())]


def row_states(rows: list[TokenRow], sizes: Sizes, device: str = "cpu") -> Iterator[Tensor]:
    """[T, A + 1, H] bfloat16 for each row: standard normal, the same at every call."""
    generator = torch.Generator(device).manual_seed(1)
    for row in rows:
        shape = (len(row.token_ids), len(sizes.layer_ids) + 1, sizes.hidden)
        yield torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).cpu()


def write_target(target_dir: Path, sizes: Sizes, device: str = "cpu") -> None:
    """Write config.json and the three tensors that a trainer reads; random, bfloat16."""
    target_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": sizes.model_type,
        "architectures": ["LlamaForCausalLM" if sizes.model_type == "llama" else "Qwen3ForCausalLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (target_dir / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator(device).manual_seed(2)
    shape = (sizes.vocab, sizes.hidden)
    tensors = {
        name: 0.05 * torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).cpu()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(
        tensors | {"model.norm.weight": torch.ones(sizes.hidden, dtype=torch.bfloat16)},
        target_dir / "model.safetensors",
    )


def write_ours(root: Path, rows: list[TokenRow], sizes: Sizes, device: str = "cpu") -> Vocab:
    """Write the shard and the vocabulary, the K most frequent ids, under root/ours."""
    info = {"layer_ids": sizes.layer_ids}
    write_hidden_states(
        root / "ours" / "shard", rows, row_states(rows, sizes, device), CHUNK_BYTES, info, encoding="bf16"
    )
    vocab = build_vocab(torch.arange(sizes.vocab, 0, -1), sizes.draft_vocab, [])
    save_vocab(root / "ours" / "vocab.safetensors", vocab)
    return vocab


def write_peer(root: Path, rows: list[TokenRow], sizes: Sizes, vocab: Vocab) -> None:
    """Write the peer's directory under root/peer."""
    import numpy as np
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    peer, size = root / "peer", sizes.draft_vocab
    (peer / "hidden_states").mkdir(parents=True, exist_ok=True)
    for i, (row, states) in enumerate(zip(rows, row_states(rows, sizes), strict=True)):
        tensors = {"hidden_states": states, "token_ids": torch.tensor(row.token_ids)}
        save_file(tensors, peer / "hidden_states" / f"hs_{i}.safetensors")
    columns = {
        "input_ids": [r.token_ids for r in rows],
        "loss_mask": [[int(m) for m in r.loss_mask] for r in rows],
        "seq_len": [len(r.token_ids) for r in rows],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(str(peer))
    np.save(peer / f"d2t-{size}.npy", vocab.d2t.numpy())
    np.save(peer / f"t2d-{size}.npy", vocab.t2d.numpy())


def write_both(root: Path, num_rows: int, supervised: float, sizes: Sizes = SMOLLM2) -> None:
    """Write target, ours and peer under `root`."""
    rows = make_rows(num_rows, supervised, sizes.vocab)
    write_target(root / "target", sizes)
    write_peer(root, rows, sizes, write_ours(root, rows, sizes))
