"""Chats of several turns and tool tasks through the whole chain: which stage answers what, and what runs
again after which change."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_chain import counts

from eagle3.shards.tokens import read_token_shard
from tests.helpers.flyte_runs import pyflyte_run, write_prompts, write_recipe
from workflows.flyte import store

TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function.name + ';' }}{% endfor %}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '[{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}]' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = {"function": {"name": "now", "arguments": {}}}


def chat(i: int) -> dict[str, Any]:
    turns = [("user", f"Hi {i}"), ("assistant", "x"), ("user", "Bye"), ("assistant", "y")]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def task(i: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return {
        "messages": [{"role": "user", "content": f"Time {i}?"}, asked, {"role": "tool", "content": "noon"}],
        "tools": [TOOL],
    }


class Agents:
    """Runs the chain on chats, tool tasks and prompts."""

    def __init__(self, workplace: Path, target: Path) -> None:
        self.workplace, self.target = workplace, target
        (workplace / "template.jinja").write_text(TEMPLATE)

    def run(self, num_tasks: int = 3, **regenerate: Any) -> dict[str, Any]:
        for name, rows in (("chats", map(chat, range(2))), ("tasks", map(task, range(num_tasks)))):
            (self.workplace / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [
            {"path": str(self.workplace / f"{name}.jsonl"), "name": name} for name in ("chats", "tasks")
        ]
        prompts = write_prompts(self.workplace / "prompts.jsonl", 0, 4)
        blocks = {
            "data": {"sources": sources},
            "target": {"chat_template": str(self.workplace / "template.jinja")},
        }
        blocks |= {
            "regenerate": {
                "sources": {"tasks": {"temperature": 0.0, "max_new_tokens": 7}},
                "tool_parser": "openai",  # needs no import of vLLM
            }
            | regenerate
        }
        result = pyflyte_run(write_recipe(self.workplace / "recipe.yaml", self.target, prompts, **blocks))
        assert result.exit_code == 0, (result.output, result.exception)
        self.output = result.output
        summary: dict[str, Any] = json.loads((self.workplace / "runs/tiny/summary.json").read_text())
        return summary


@pytest.fixture(scope="module")
def agents(workplace: Path, tiny_target: Path) -> Agents:
    return Agents(workplace, tiny_target)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_chats_and_tool_tasks_are_answered_in_one_fan_out_and_trained_together(agents: Agents) -> None:
    first = counts(agents.run())
    assert first["regenerate_responses"] == (3, 0)
    assert first["extract_hidden_states"] == (3, 0)
    assert "regenerate_responses: 9 conversations, 11 user turns requested = " in agents.output
    (traces,) = store.root().glob("regenerate_responses-*/shard-00002.parquet")
    rows = read_token_shard(traces)
    assert {row.source for row in rows} == {"tasks"}
    assert all(2 <= sum(row.loss_mask) <= 7 for row in rows)

    again = counts(agents.run())
    assert not any(runs for runs, _ in again.values())
    appended = counts(agents.run(num_tasks=4))
    assert appended["regenerate_responses"] == (1, 2)
    assert appended["extract_hidden_states"] == (1, 2)
    other = counts(agents.run(num_tasks=4, sources={"tasks": {"temperature": 0.0, "max_new_tokens": 6}}))
    assert other["regenerate_responses"] == (1, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_shard_without_a_row_left_is_left_out_and_none_at_all_is_an_error(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One token is no answer to learn from: all tool tasks are lost.
    counted = counts(agents.run(sources={"tasks": {"max_new_tokens": 1}}))
    assert (counted["regenerate_responses"], counted["extract_hidden_states"][1]) == ((1, 2), 2)
    assert "3 failed (too_short 3)" in agents.output
    prompts = write_prompts(agents.workplace / "prompts.jsonl", 0, 4)
    result = pyflyte_run(
        write_recipe(
            agents.workplace / "recipe.yaml", agents.target, prompts, regenerate={"max_new_tokens": 1}
        )
    )
    assert result.exit_code != 0
    assert "got 4 conversations, 4 user turns requested = 0 answered + 4 failed (too_short 4)" in " ".join(
        result.output.split()
    )


@pytest.mark.usefixtures("light")
def test_sampling_of_a_source_that_is_not_there_is_refused_first(agents: Agents) -> None:
    recipe = write_recipe(
        agents.workplace / "recipe.yaml",
        agents.target,
        write_prompts(agents.workplace / "prompts.jsonl", 0, 4),
        regenerate={"sources": {"chat": {"temperature": 0.0}}},
    )
    result = pyflyte_run(recipe)
    assert result.exit_code != 0
    assert "regenerate.sources must name sources of this run (train), got chat" in " ".join(
        result.output.split()
    )
