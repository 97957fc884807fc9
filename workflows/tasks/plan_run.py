"""plan: a run's rows, bytes and hours before it runs. What a run would refuse, resolve_inputs has refused
before."""

import json
from html import escape

from flytekit import Deck, task
from flytekit.types.file import FlyteFile

from workflows.flyte import store
from workflows.flyte.interfaces import ResolvedInputs
from workflows.flyte.pods import DECK, LIGHT
from workflows.flyte.recipe import Recipe
from workflows.flyte.run_dir import run_dir, write_text
from workflows.flyte.stage import recoverable


@task(**LIGHT, **DECK)
@recoverable
def plan_run(recipe: Recipe, found: ResolvedInputs) -> FlyteFile:
    """Print the plan and write plan.json: into runs/<run_name> here, into an output directory with a Deck in
    a pod."""
    from eagle3.planning.plan import make_plan, render_text
    from eagle3.planning.workload import workload
    from eagle3.reports.parts import document

    work = workload(recipe, found.surveys)
    config = json.loads(found.target_config)
    plan = make_plan(recipe, config, found.target.name, found.surveys, found.num_heldout, work)
    text = render_text(plan) + _disk_text(plan.max_state_bytes)
    out = run_dir(recipe.run_name)
    write_text(out / "plan.json", json.dumps(plan.to_dict(), indent=1))
    name = recipe.run_name
    Deck("Plan", document(f"Plan of {name}", f"<h1>{escape(name)}</h1><pre>{escape(text)}</pre>"))
    print(text, flush=True)
    return FlyteFile(str(out / "plan.json"))


def _disk_text(needed: int) -> str:
    if not store.is_local() or needed <= store.free_bytes():
        return ""
    free = f"{store.root()} has {store.free_bytes() / 1e9:.3f} GB free"
    return f"note      a run on this machine would be refused: {free}\n"
