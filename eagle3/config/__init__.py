"""Settings: one frozen pydantic model per stage; a recipe is a YAML file with one block for each.

The cache key of a stage holds its settings, including engine settings that only change speed. It holds the
content or commit of files instead of their paths. It holds no settings of where and how a stage runs:
FanOutConfig, ResourcesConfig, DataConfig.workers and HOW_ONLY of TrainConfig. For each setting,
tests/workflows/test_cache_keys.py lists the stages that run again. Validators run on every Flyte hop: they
are cheap and open no file.
"""
