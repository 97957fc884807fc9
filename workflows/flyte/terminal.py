"""What a run prints at its end."""

from typing import Any


def summary_text(summary: dict[str, Any]) -> str:
    """The stages as a table, the results, where the files are, how to serve the draft."""
    from eagle3.reports.run import SERVE_NOTE

    speed = summary["tokens_per_s"]
    vocab = summary["vocab"]
    prompts = summary["prompts"]
    positions = ", ".join(f"{share:.3f}" for share in summary["acceptance_by_position"])
    lines = ["", f"{'stage':<24}{'seconds':>9}   made or cached"]
    lines += [f"{s['name']:<24}{s['seconds']:>9.1f}   {made_or_cached(s)}" for s in summary["stages"]]
    lines += [
        "",
        f"prompts                 {prompts['train']} for training, {prompts['heldout']} held out",
        f"dropped                 {dropped_text(summary['data'])}",
        f"answers                 {answers_text(summary['answers'])}",
        f"draft vocabulary        {vocab['size']} tokens, {vocab['coverage']:.2%} of the answers' tokens",
        f"acceptance length       {summary['acceptance_length']:.3f}; "
        f"by the trainer {summary['trainer_acceptance_length']:.3f}",
        f"acceptance by position  {positions}",
        f"tokens/s                {speed['with_draft']:.1f} with the draft, "
        f"{speed['without_draft']:.1f} without",
        f"same text as without    {'yes' if summary['outputs_identical'] else 'NO'}",
        "",
        f"draft     {summary['export_dir']}",
        f"metrics   {summary['metrics']}",
        f"report    {summary['report_html']}",
        f"data      {summary['data_html']}",
        f"summary   {summary['summary_json']}",
        "",
        f"Serve it. {SERVE_NOTE}",
        *(f"  {line}" for line in summary["serve"].values()),
        "",
    ]
    return "\n".join(lines)


def data_text(report: dict[str, Any], num_shards: int, shards_dir: str, report_html: str) -> str:
    """What prepare made: a line for each source, totals, where the files are."""
    lines = ["", f"{'source':<32} {'read':>9} {'kept':>9} {'tokens':>13} {'supervised':>13}  dropped"]
    for name, source in report["sources"].items():
        rows = f"{source['rows_read']:>9,} {source['rows_kept']:>9,}"
        tokens = f"{source['tokens']:>13,} {source['supervised_tokens']:>13,}"
        lines.append(f"{name:<32} {rows} {tokens}  {dropped_text(source)}")
    prompts = report["prompts"]
    lines += [
        "",
        f"rows      {prompts['train']:,} in {num_shards} shards, {prompts['heldout']:,} held out",
        f"shards    {shards_dir}",
        f"report    {report_html}",
        "",
    ]
    return "\n".join(lines)


def dropped_text(report: dict[str, Any]) -> str:
    """Rows that prepare dropped, by reason."""
    dropped = {reason: count for reason, count in report["dropped"].items() if count}
    text = f"{sum(dropped.values())} of {report['rows_read']} rows"
    if not dropped:
        return text
    return f"{text} ({', '.join(f'{count} {reason}' for reason, count in dropped.items())})"


def answers_text(answers: dict[str, Any]) -> str:
    """What became of the user turns that the target was asked to answer
    (eagle3.reports.data.answer_statistics), in one line."""
    from eagle3.reports.data import is_limit_low

    if not answers:
        return "the rows' own"
    failed = f"{answers['failed']:,} failed"
    if reasons := answers["failed_by_reason"]:
        failed += f" ({', '.join(f'{number:,} {reason}' for reason, number in reasons.items())})"
    warning = ", TOO MANY: raise regenerate.max_new_tokens" if is_limit_low(answers) else ""
    return (
        f"{answers['requested']:,} requested = {answers['answered']:,} answered + {failed} + "
        f"{answers['skipped']:,} skipped; {answers['at_length_limit']:,} at the length limit{warning}; "
        f"{answers['tool_calls']:,} tool calls"
    )


def made_or_cached(stage: dict[str, Any]) -> str:
    """`made`, `cached`, or both with counts."""
    counts = {"made": stage["runs"], "cached": stage["cached"]}
    return ", ".join(f"{word} {count}" for word, count in counts.items() if count) or "skipped"
