"""What a run has to go on with: its checkpoints say it, and a resume is held to it.

The plan may have grown: one with the same options whose first epochs are all of the old plan's takes its place.
"""

from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, digest
from dflash_prep.manifest import BESIDE_SETTINGS, Plan

PLAN = ("plan_fingerprint", "plan_options", "plan_epochs", "total_steps")  # what differs in a longer plan, options apart


def plan_identity(plan: Plan) -> dict:
    """A plan by its content: as a whole, and its options (with what they held out) and each epoch on their own."""
    settings = {key: value for key, value in plan.manifest.items() if key not in BESIDE_SETTINGS}
    held_out = plan["holdout_set"]["fingerprint"] if plan["holdout_set"] else None
    return {
        "plan_fingerprint": plan["fingerprint"],
        "plan_options": digest(canonical_json([settings, held_out])),
        "plan_epochs": [epoch["fingerprint"] for epoch in plan["epochs"]],
        "total_steps": plan.total_steps,
    }


def check_identity(path: Path, state: dict, expected: dict) -> bool:
    """Refuse a checkpoint whose `state` says another run than `expected`; returns whether the plan has grown."""
    grown = plan_has_grown(path, state, expected)
    for key, value in expected.items():
        if state.get(key) == value or (grown and key in PLAN):
            continue
        if key == "recipe":
            began = state[key] if isinstance(state.get(key), dict) else {}
            words = " ".join(f"--{name} {began.get(name)}" for name in value)
            raise UserError(f"{path}: was trained with another recipe; go on with the same {words}")
        raise UserError(f"{path}: was trained with another {key.replace('_', ' ')}; name the one it began with")
    return grown


def plan_has_grown(path: Path, state: dict, expected: dict) -> bool:
    """Whether the plan is another one that a run may go on with; one that it may not is refused with the reason."""
    if state.get("plan_fingerprint") == expected["plan_fingerprint"]:
        return False
    began, epochs = state.get("plan_epochs"), expected["plan_epochs"]
    if state.get("plan_options") != expected["plan_options"] or not isinstance(began, list):
        reason = "its options differ in more than --epochs"
    elif len(began) >= len(epochs):
        reason = f"it has {len(epochs)} epochs, not more than the {len(began)} that it began with"
    elif epochs[: len(began)] != began:
        reason = f"its first {len(began)} epochs are others"
    else:
        return True
    raise UserError(f"{path}: was trained with another plan ({reason}); name the one it began with, or a longer one of it")
