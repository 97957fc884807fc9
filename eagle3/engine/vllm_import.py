"""Imports vLLM and our engine once, in the process that forks all engines."""

import gc

# Garbage collection takes 3 of the import's 15 s; the imported objects live on, so later runs may skip them.
gc.disable()

import vllm  # noqa: E402
import vllm.v1.worker.gpu_worker  # noqa: E402, F401

from eagle3.engine.vllm_engine import VllmEngine as VllmEngine  # noqa: E402

gc.freeze()
gc.enable()
