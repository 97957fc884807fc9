"""Imports vLLM and its engines' modules, once for all engines that are forked from this process."""

import gc

# Collections during the import take 3 of 15 s; what it makes stays for good, so later collections may skip
# it.
gc.disable()

import vllm  # noqa: E402
import vllm.v1.worker.gpu_worker  # noqa: E402, F401

from eagle3.engine.vllm_engine import VllmEngine as VllmEngine  # noqa: E402

gc.freeze()
gc.enable()
