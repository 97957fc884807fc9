"""Tests run tiny tensors: one thread is faster than two, and leaves the other core alone."""

import torch

torch.set_num_threads(1)
