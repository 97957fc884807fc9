"""Which draft is served: when another replaces it, and the pointer after faults."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from eagle3 import promotion
from eagle3.files import list_files, read_bytes, write_bytes
from eagle3.promotion import Measurement, Promoted, current_promotion, decide, promote, restore_pointer

NEW = Measurement("new", "heldout", "k = 3", 2.0, True)
CURRENT = replace(NEW, digest="current")


def test_the_first_draft_is_promoted() -> None:
    assert decide(NEW, None, 0.0).promote


@pytest.mark.parametrize(
    ("length", "margin", "is_promoted"),
    [
        (2.5, 0.0, True),
        (2.0, 0.0, True),
        (1.75, 0.25, True),
        (1.75, 0.125, False),
        (1.5, 0.0, False),
        (float("nan"), 5.0, False),
    ],
)
def test_a_draft_that_is_worse_by_no_more_than_the_margin_is_promoted(
    length: float, margin: float, is_promoted: bool
) -> None:
    decision = decide(replace(NEW, acceptance_length=length), CURRENT, margin)
    assert decision.promote == is_promoted
    assert f"{length:.2f}" in decision.reason or length != length


def test_a_draft_that_changes_the_text_is_never_promoted() -> None:
    changing = replace(NEW, acceptance_length=9.0, outputs_identical=False)
    assert not decide(changing, None, 0.0).promote
    assert not decide(changing, CURRENT, 0.0).promote
    assert decide(changing, None, 0.0, identical_text=False).promote


def test_the_current_draft_is_not_promoted_again() -> None:
    assert decide(CURRENT, CURRENT, 0.5) == promotion.Decision(False, "it is the current draft")


@pytest.mark.parametrize("other", [{"heldout_digest": "others"}, {"settings": "k = 5"}])
def test_drafts_measured_on_other_prompts_or_settings_are_not_compared(other: Any) -> None:
    with pytest.raises(ValueError, match="evaluate the current draft again"):
        decide(NEW, replace(CURRENT, **other), 9.0)


@pytest.fixture(params=["directory", "store"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "drafts of ours")
    request.getfixturevalue("s3")
    return "s3://states/drafts"


def write_export(path: Path, text: str) -> str:
    path.mkdir()
    for name in promotion.FILES:
        (path / name).write_text(f"{name} {text}")
    return str(path)


def promotion_of(digest: str, number: int, previous: str = "") -> Promoted:
    return Promoted(
        number=number,
        export="set later",
        digest=digest,
        acceptance_length=2.0,
        heldout_digest="h",
        target="org/model",
        target_digest="t",
        previous=previous,
    )


def test_the_pointer_names_the_last_draft_and_earlier_ones_are_kept(uri: str, tmp_path: Path) -> None:
    assert current_promotion(uri) is None
    for number, digest in enumerate(["one", "two", "one"], 1):
        made = promote(uri, write_export(tmp_path / f"{number}", digest), promotion_of(digest, number))
        assert made == current_promotion(uri)
        assert json.loads(read_bytes(f"{uri}/promoted.json") or b"")["export"] == f"{uri}/drafts/{digest}"
    for digest in ("one", "two"):
        for name in promotion.FILES:
            assert read_bytes(f"{uri}/drafts/{digest}/{name}") == f"{name} {digest}".encode()


def test_a_damaged_kept_draft_is_replaced(uri: str, tmp_path: Path) -> None:
    export = write_export(tmp_path / "export", "one")
    promote(uri, export, promotion_of("one", 1))
    write_bytes(f"{uri}/drafts/one/{promotion.FILES[0]}", b"half")
    promote(uri, export, promotion_of("one", 2))
    for name in promotion.FILES:
        assert read_bytes(f"{uri}/drafts/one/{name}") == f"{name} one".encode()
    assert len(list_files(f"{uri}/drafts/one", "*")) == len(promotion.FILES)


def test_of_several_promotions_at_once_one_wins_and_the_others_get_an_error(uri: str, tmp_path: Path) -> None:
    exports = {digest: write_export(tmp_path / digest, digest) for digest in "abcd"}

    def attempt(digest: str) -> str:
        try:
            return promote(uri, exports[digest], promotion_of(digest, 1)).digest
        except FileExistsError:
            return ""

    with ThreadPoolExecutor(4) as pool:
        (winner,) = filter(None, pool.map(attempt, exports))
    current = current_promotion(uri)
    assert current is not None
    assert current.digest == winner
    assert json.loads(read_bytes(f"{uri}/promoted.json") or b"")["digest"] == winner


def test_a_promotion_killed_before_the_pointer_is_written_counts(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(uri, write_export(tmp_path / "one", "one"), promotion_of("one", 1))
    with monkeypatch.context() as patch:
        patch.setattr(promotion, "write_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            promote(uri, write_export(tmp_path / "two", "two"), promotion_of("two", 2))
    found = current_promotion(uri)
    assert found is not None
    assert found.digest == "two"
    promote(uri, write_export(tmp_path / "three", "three"), promotion_of("three", 3))
    assert json.loads(read_bytes(f"{uri}/promoted.json") or b"")["number"] == 3


@pytest.mark.parametrize("cut", ["write_bytes", "current_promotion"])
def test_a_promotion_that_is_repeated_counts_once(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """Its first attempt lost the store after the record, or after all was done."""
    exports = {digest: write_export(tmp_path / digest, digest) for digest in ("one", "two", "three")}
    promote(uri, exports["one"], promotion_of("one", 1))

    def lose(*_: object) -> None:
        raise ConnectionError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(promotion, cut, lose)
        with pytest.raises(ConnectionError, match="lost"):
            promote(uri, exports["two"], promotion_of("two", 2, "one"))
    for _ in range(2):
        again = promote(uri, exports["two"], promotion_of("two", 2, "one"))
        assert again == current_promotion(uri)
        assert len(list_files(f"{uri}/promotions", "*.json")) == 2
    promote(uri, exports["three"], promotion_of("three", 3, "two"))
    assert promote(uri, exports["two"], promotion_of("two", 2, "one")) == again
    assert json.loads(read_bytes(f"{uri}/promoted.json") or b"")["digest"] == "three"


def test_a_store_that_refuses_a_promotion_is_a_lost_connection(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's own errors are not OSErrors."""

    def lose(*_: object, **__: object) -> None:
        raise EndpointConnectionError(endpoint_url="http://store")

    monkeypatch.setattr(s3, "pipe_file", lose)
    with pytest.raises(
        ConnectionError, match=r"promotions/00001.json could not be written .*Could not connect"
    ):
        promote("s3://states/drafts", write_export(tmp_path / "one", "one"), promotion_of("one", 1))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"export": "x"}', '{"number": 0}'])
def test_a_broken_pointer_is_an_error_and_is_not_changed(tmp_path: Path, text: str) -> None:
    (tmp_path / "promoted.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"promoted\.json does not name a promoted draft (?s:.*) restore it from promotions/"
    ):
        current_promotion(str(tmp_path))
    assert (tmp_path / "promoted.json").read_text() == text


def test_a_promoted_draft_that_is_gone_is_an_error(tmp_path: Path) -> None:
    made = promote(str(tmp_path), write_export(tmp_path / "x", "x"), promotion_of("x", 1))
    Path(made.export, "config.json").unlink()
    with pytest.raises(ValueError, match="is gone; put it back"):
        current_promotion(str(tmp_path))


def test_an_earlier_draft_is_promoted_again_with_the_next_number(uri: str, tmp_path: Path) -> None:
    one, two = (
        promote(uri, write_export(tmp_path / digest, digest), promotion_of(digest, number))
        for number, digest in ((1, "one"), (2, "two"))
    )
    write_bytes(f"{uri}/promotions/00003.json", one.model_dump_json().encode())
    with pytest.raises(ValueError, match="must have its own number 3, got 1"):
        current_promotion(uri)
    write_bytes(
        f"{uri}/promotions/00003.json", one.model_copy(update={"number": 3}).model_dump_json().encode()
    )
    back = current_promotion(uri)
    assert back is not None
    assert (back.digest, back.number) == ("one", 3)
    assert back.digest != two.digest
    pointer = read_bytes(f"{uri}/promoted.json")
    assert pointer is not None
    assert Promoted.model_validate_json(pointer) == two
    assert restore_pointer(uri) == back
    pointer = read_bytes(f"{uri}/promoted.json")
    assert pointer is not None
    assert Promoted.model_validate_json(pointer) == back
