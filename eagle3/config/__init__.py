"""Settings: one frozen pydantic model per stage; a recipe is a YAML file with one block for each.

A stage's settings are part of its cache key, those of the engine included that only change its speed. In no key are places (what
lies there is, by content or commit) nor what says where and how a stage runs: FanOutConfig, DataConfig.workers, and HOW_ONLY of
TrainConfig. tests/workflows/test_cache_keys.py says of each setting which stages run again. What must hold between stages stands
in config_checks.py. Validators run on every Flyte hop: they are cheap and touch no file.
"""
