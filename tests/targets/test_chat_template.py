"""A chat template of a recipe is part of the target's identity, and the only one in its directory."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from eagle3.config.engine import TargetConfig
from eagle3.data.chat import load_chat_tokenizer
from eagle3.targets.chat_template import put_chat_template, read_chat_template
from eagle3.targets.resolve import fetch_target, identify_target
from tests.helpers.tiny_tokenizer import CHATML, train_tokenizer

GIVEN = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}ä\n"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.jinja"
    path.write_text(GIVEN)
    return path


def write_target(directory: Path, template: object = CHATML) -> Path:
    """A directory as AutoTokenizer reads it; a dict of templates becomes files of named ones."""
    import torch

    tokenizer = train_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    save_file({"w": torch.zeros(3)}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def test_a_template_is_part_of_the_digest_by_its_content(tmp_path: Path, given: Path) -> None:
    target = TargetConfig(name=str(write_target(tmp_path / "tiny")))
    own = identify_target(target)
    with_given = identify_target(target.model_copy(update={"chat_template": str(given)}))
    assert (with_given[:2], own[:2]) == (own[:2], ("tiny", own[2]))
    assert with_given[2] != own[2]
    copy = tmp_path / "copy.jinja"
    copy.write_text(GIVEN)
    assert identify_target(target.model_copy(update={"chat_template": str(copy)})) == with_given
    assert identify_target(target.model_copy(update={"chat_template": f"file://{copy}"})) == with_given
    copy.write_text(GIVEN + "x")
    assert identify_target(target.model_copy(update={"chat_template": str(copy)}))[2] not in (
        own[2],
        with_given[2],
    )


def in_config(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML}))


def named_in_config(directory: Path) -> None:
    in_config(directory)
    path = directory / "tokenizer_config.json"
    named = [{"name": n, "template": f"{{{{ 'own {n}' }}}}"} for n in ("default", "tool_use")]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))


def for_a_processor(directory: Path) -> None:
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))


def beside_another(directory: Path) -> None:
    (directory / "tool_use.jinja").write_text(CHATML)


def none_at_all(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    "arrange", [lambda d: None, in_config, named_in_config, for_a_processor, beside_another, none_at_all]
)
def test_the_given_template_is_the_only_one_of_the_fetched_directory(
    tmp_path: Path, given: Path, arrange: object
) -> None:
    own = write_target(tmp_path / "tiny")
    arrange(own)  # type: ignore[operator]
    before = {f.name: f.read_bytes() for f in own.iterdir()}
    out = tmp_path / "out"
    for _ in range(2):
        fetch_target(TargetConfig(name=str(own), chat_template=str(given)), out)
    tokenizer = load_chat_tokenizer(out)
    assert tokenizer.chat_template == GIVEN
    assert tokenizer.get_chat_template(tools=[{"name": "f"}]) == GIVEN
    found = {f.name for f in out.iterdir()}
    assert {name for name in found if "template" in name or name.endswith(".jinja")} == {
        "chat_template.jinja"
    }
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert {f.name: f.read_bytes() for f in own.iterdir()} == before


def test_named_templates_in_files_of_their_own_are_replaced(tmp_path: Path) -> None:
    target = write_target(tmp_path / "tiny", {"default": CHATML, "tool_use": "{{ 'tools' }}"})
    assert (target / "additional_chat_templates").is_dir()
    put_chat_template(target, GIVEN)
    assert load_chat_tokenizer(target).chat_template == GIVEN


def test_a_target_keeps_its_own_template_if_none_is_given(tmp_path: Path) -> None:
    own = write_target(tmp_path / "tiny")
    in_config(own)
    fetch_target(TargetConfig(name=str(own)), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == (
        own / "tokenizer_config.json"
    ).read_bytes()
    assert load_chat_tokenizer(tmp_path / "out").chat_template == CHATML


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe{", "UTF-8"),
        (b"a\n{% for m in messages %}", "line 2"),
        (b"{% frobnicate %}", "line 1: .*frobnicate.*correct the template"),
        (b"{{ 'a' | no_such_filter }}", "line 1: .*no_such_filter"),
    ],
)
def test_a_template_that_cannot_be_used_is_named_before_anything_is_fetched(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "given.jinja"
    if content is not None:
        path.write_bytes(content)
    cfg = TargetConfig(name=str(write_target(tmp_path / "tiny")), chat_template=str(path))
    for use in (identify_target, lambda cfg: fetch_target(cfg, tmp_path / "out")):
        with pytest.raises(ValueError, match=f"target.chat_template {re.escape(str(path))}.*{message}"):
            use(cfg)
    assert not (tmp_path / "out").exists()


def test_a_directory_or_an_unknown_store_is_no_template(tmp_path: Path) -> None:
    for uri in (str(tmp_path), "nostore://bucket/a.jinja"):
        with pytest.raises(ValueError, match=f"target.chat_template {re.escape(uri)} cannot be read"):
            read_chat_template(uri)


def test_tags_that_only_chat_templates_have_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "given.jinja"
    path.write_text(
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% generation %}x{% endgeneration %}{% endfor %}"
    )
    assert read_chat_template(str(path)) == path.read_text()
