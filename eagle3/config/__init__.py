"""Settings: one frozen pydantic model per stage; a recipe is a YAML file with one block for each.

A stage's settings are part of its cache key, also those of the engine that only change its speed. No key
holds paths and URIs (keys hold the content or commit there) or settings that say where and how a stage runs:
FanOutConfig, ResourcesConfig, DataConfig.workers and HOW_ONLY of TrainConfig.
tests/workflows/test_cache_keys.py has, for each setting, the stages that run again. Validators run on every
Flyte hop: they are cheap and touch no file.
"""
