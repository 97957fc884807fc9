"""The metrics file."""

from pathlib import Path

from eagle3.training.metrics import read_metrics


def test_a_line_of_another_process_that_is_cut_short_waits(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_metrics(tmp_path / "metrics") == [{"step": 1}, {"step": 2}]
