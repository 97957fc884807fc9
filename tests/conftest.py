"""Tests run tiny tensors: one thread is faster than two, here and in processes of theirs, and leaves the other core alone."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
