"""What a manifest must state to be shown to people, beyond what every reader needs."""

from dflash_prep.errors import UserError
from dflash_prep.rules import broken, counts, list_of, number, object_of, optional, text, values_of, whole

KNOWN, POSITIVE = number(-1e300, 1e300), number(1e-300, 1e300)
COUNTS = "fewest_copies", "most_copies", "most_tokens", "most_anchors", "slots_per_step", "empty_slots"
SHARES = "real_token_share", "padding_share", "seconds", "gap_to_optimum", "straggler_share", "straggler_share_of_cost"
CERTIFICATE = {
    **dict.fromkeys(COUNTS, whole(0)),
    **dict.fromkeys(SHARES, KNOWN),
    **dict.fromkeys(("fill", "design_effect", "step_correlation", "jaccard", "jaccard_random"), optional(KNOWN)),
    "straggler_cost": text(),
}
SOURCE = object_of({"samples": whole(0), "weight": KNOWN, "per_epoch": whole(0)})
EPOCH = object_of({"padded_tokens": whole(1)})
PLAN = {
    "certificate": object_of(CERTIFICATE),
    "curve": optional(
        object_of(
            {"seconds": list_of(POSITIVE, least=1), "chosen": POSITIVE, "optimum": POSITIVE, "padding": list_of(KNOWN, 1)}
        )
    ),
    "sources": values_of(SOURCE),
    "epochs": list_of(EPOCH),
    "holdout_set": optional(EPOCH),
}
STORE = {  # each only where it is stated
    "counts": object_of(dict.fromkeys(("truncated", "split", "pieces"), optional(whole(0)))),
    "formats": counts,
    "special_texts": whole(0),
    "other_files": whole(0),
    "lost_files": list_of(text()),
    "options": object_of({}),
}


def check_plan(plan) -> None:
    """Refuse a Plan whose figures are none."""
    if key := broken(plan.manifest, PLAN):
        raise UserError(f"{plan.path}: plan.json states no valid {key}; it is damaged, remove it and plan again")


def check_store(store) -> None:
    """Refuse a Store whose figures are none."""
    if key := broken(store.manifest, {key: rule for key, rule in STORE.items() if key in store.manifest}):
        raise UserError(f"{store.path}: store.json states no valid {key}; it is damaged, remove it and tokenize again")
