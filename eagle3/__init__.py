"""Train an EAGLE-3 draft for a target model.

prepare     data/         chat rows become token ids and loss masks           -> token shards
regenerate  regenerate/   the target answers the prompts itself               -> token shards
vocab       vocab.py      the most frequent answer tokens                     -> d2t, t2d
extract     engine/       the engine's hidden states for every token          -> hidden-state shards
train       training/     the draft of draft/, unrolled as in serving         -> draft checkpoint
export      export.py     the directory that vLLM loads, checked by tensor    -> export
evaluate    evaluation/   acceptance length and speed on held-out prompts     -> report
promote     promotion.py  the draft to serve, if it is no worse               -> promoted.json
"""
