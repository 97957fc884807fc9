"""Which rows of a shard share a frame and a chunk: a function of the rows alone, so that whoever goes on cuts the shard alike."""

from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.shards.tokens import TokenRow

# Uncompressed. Small rows share a frame, since states of a shared prefix repeat from row to row.
FRAME_BYTES = 1 << 20
Frame = list[int]


def row_bytes(row: TokenRow, num_aux: int, hidden_size: int, encoding: str) -> int:
    """Size of a row in a chunk before compression, bytes."""
    last_states = sum(a and b for a, b in zip(row.loss_mask, row.loss_mask[1:], strict=False))
    return hidden_state_bytes(len(row.token_ids), last_states, num_aux, hidden_size, encoding)


def plan_chunks(sizes: list[int], chunk_bytes: int) -> list[list[Frame]]:
    """Cut a shard into chunks of frames: a frame ends with the row that fills it, a chunk with the frame that does.

    Args:
        sizes: of the rows before compression, bytes.
        chunk_bytes: of a chunk.

    Returns:
        for each chunk its frames, lists of row numbers; all together count up from 0.
    """
    chunks: list[list[Frame]] = [[[]]]
    frame_size = chunk_size = 0
    for row, size in enumerate(sizes):
        if chunk_size >= chunk_bytes:
            chunks.append([[]])
            frame_size = chunk_size = 0
        elif frame_size >= min(FRAME_BYTES, chunk_bytes):
            chunks[-1].append([])
            frame_size = 0
        chunks[-1][-1].append(row)
        frame_size, chunk_size = frame_size + size, chunk_size + size
    return chunks
