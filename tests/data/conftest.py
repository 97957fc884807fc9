"""The tiny tokenizer, in memory and in a target directory; a directory with source files to prepare."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.helpers.tiny_tokenizer import train_tokenizer
from tests.helpers.workplace import Workplace


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path_factory.mktemp("target")
    tokenizer.save_pretrained(str(path))
    return path


@pytest.fixture
def workplace(tmp_path: Path, tokenizer_dir: Path) -> Workplace:
    return Workplace(tmp_path, tokenizer_dir)
