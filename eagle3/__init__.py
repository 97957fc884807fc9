"""Train an EAGLE-3 draft for a target model.

prepare     data/        chat rows become token ids and loss masks        -> token shards
regenerate  target/      the target answers the prompts itself            -> token shards
vocab       vocab.py     the most frequent answer tokens                  -> d2t, t2d
extract     target/      the engine's hidden states for every token       -> hidden-state shards
train       draft/, training/   one layer, unrolled like serving          -> draft checkpoint
export      export.py    the directory that vLLM loads                    -> verified tensor by tensor
evaluate    evaluation/  acceptance length and speed on held-out prompts  -> report
"""
