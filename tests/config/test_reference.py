"""docs/settings.md is what the fields of the settings say."""

from pathlib import Path

from eagle3.config.reference import is_unkeyed, render_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_settings_is_generated() -> None:
    assert (DOCS / "settings.md").read_text() == render_settings(), "run make docs"


def test_each_row_has_key_type_default_and_effect() -> None:
    page = render_settings()
    for row in (
        "| `vocab.size` | integer, ≥ 1 | `32000` | size of the draft vocabulary, at most the target's |",
        '| `train.optimizer` | `"adamw"`, `"muon"` | `"adamw"` |',
        "| `data.sources[].thinking` | true or false or null | `null` |",
        "| `regenerate.sources.<name>.top_p` | number or null, > 0, ≤ 1 | `null` |",
        "| `fanout.server_urls` † | list of text | `[]` |",
        "| `resources.trainer.gpus` † | integer, ≥ 1 | `1` |",
        "| `promote.place` | text | required |",
    ):
        assert row in page
    assert page.count("`data.sources[].path`") == 1


def test_settings_of_how_a_stage_runs_are_marked() -> None:
    assert is_unkeyed("train", "disk_budget_bytes")
    assert is_unkeyed("resources", "engine.cpu")
    assert not is_unkeyed("train", "learning_rate")
    assert not is_unkeyed("promote", "place")
