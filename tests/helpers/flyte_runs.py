"""A target of a hundred thousand random weights over bytes, runs of the whole chain that take seconds, and a
pod of one task."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import ExecutionParameters, ExecutionState, FlyteContextManager
from flytekit.models.core.identifier import Identifier, ResourceType
from flytekit.types.file import FlyteFile

from workflows import tasks
from workflows.flyte.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_target(path: Path) -> Path:
    """Save a Llama of 4 layers, width 64, over bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def write_prompts(path: Path, first: int, last: int) -> Path:
    """Prompts number first … last - 1."""
    path.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"Say {i}."}) + "\n" for i in range(first, last))
    )
    return path


def write_recipe(path: Path, target: Path, prompts: Path, /, **blocks: dict[str, Any]) -> Path:
    """A recipe for pyflyte; blocks given replace single fields or add blocks."""
    settings: dict[str, Any] = {
        "run_name": "tiny",
        "prompts": str(prompts),
        "heldout": str(write_prompts(path.with_suffix(".heldout.jsonl"), 100, 102)),
        "target": {"name": str(target), "public_name": "tiny/bytes"},
        "engine": {
            "engine": "transformers",
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
        },
        "data": {"rows_per_shard": 4, "max_prompt_tokens": 64, "max_tokens": 128},
        "regenerate": {"max_new_tokens": 12},
        "vocab": {"size": 64},
        "extract": {"encoding": "fp32"},
        "train": {"pack_tokens": 128, "validation_rows": 2, "device": "cpu"},
        "export": {},
        "evaluate": {"max_new_tokens": 4},
        "fanout": {"replicas": 2},
    }
    for name, fields in blocks.items():
        settings[name] = settings.get(name, {}) | fields
    path.write_text(yaml.safe_dump(settings))
    return path


def make_recipe(**keys: Any) -> Recipe:
    """A recipe of defaults, with files that nobody reads, for tests of single tasks."""
    file = FlyteFile("s3://bucket/file")
    return Recipe.model_validate({"target": {"name": "a/b"}, "prompts": file, "heldout": file} | keys)


def pyflyte_run(
    recipe: Path, file: str = "train_eagle3.py", workflow: str = "train_eagle3", more: Sequence[str] = ()
) -> Result:
    """`pyflyte run` the chain, or another workflow, on a recipe and more arguments, in this process."""
    arguments = ["run", str(ROOT / "workflows" / file), workflow, "--recipe", str(recipe), *more]
    return CliRunner().invoke(main, arguments)


def all_tasks() -> list[Any]:
    """Every Flyte task of the package, @dynamic ones included."""
    modules = [
        importlib.import_module(f"{tasks.__name__}.{module.name}")
        for module in pkgutil.iter_modules(tasks.__path__)
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, PythonTask)]
    return list({task.name: task for task in found}.values())


def words(result: Result) -> str:
    """What pyflyte prints for a run that failed, on one line and without frames."""
    assert result.exit_code != 0
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@contextmanager
def pod(work: Path, checkpoint: Any = None, enable_deck: bool = True) -> Iterator[None]:
    """As pyflyte-execute sets a task up, with local directories for the cluster's storage."""
    task_id = Identifier(ResourceType.TASK, "project", "domain", "some_task", "v")
    context = FlyteContextManager.current_context()
    parameters = ExecutionParameters(
        execution_date=None,
        tmp_dir=str(work / "pod"),
        stats=None,
        execution_id=None,
        logging=None,
        raw_output_prefix=str(work / "raw"),
        output_metadata_prefix=str(work / "meta"),
        checkpoint=checkpoint,
        task_id=task_id,
        enable_deck=enable_deck,
        decks=[],
    )
    (work / "pod").mkdir(parents=True, exist_ok=True)
    state = context.new_execution_state().with_params(
        mode=ExecutionState.Mode.TASK_EXECUTION, user_space_params=parameters, working_dir=str(work / "pod")
    )
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        yield
