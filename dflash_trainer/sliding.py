"""Which of a draft's layers see only a window of what lies before them, from the four keys that say so in a `config.json`.

`layer_types` names each layer; where it is missing, transformers takes the layers from `max_window_layers` on if
`use_sliding_window` is true, and so does this. A sliding layer of a published draft is causal inside its block: the query at
p sees the keys at p−window+1 … p, those of the block like those of the context.
"""

from dflash_prep.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def layer_windows(given: dict, depth: int, where: str) -> tuple[tuple[str, ...], int | None]:
    """The `layer_types` of `depth` layers, and the window of those that slide (None where none does).

    `given` holds any of `KEYS`, each of its right type; `where` they come from, for the error if they do not fit together.
    """
    window, named = given.get("sliding_window"), given.get("layer_types")
    asked = given.get("use_sliding_window", window is not None)
    full = min(depth, given.get("max_window_layers", depth)) if asked else depth
    kinds = tuple(named) if named is not None else (FULL,) * full + (SLIDING,) * (depth - full)
    if len(kinds) != depth:
        raise UserError(f"{where}: layer_types names {len(kinds)} layers, the draft has {depth}: make them agree")
    if SLIDING not in kinds:
        return kinds, None
    if window is None or not asked:
        fault = "sliding_window is null" if window is None else "use_sliding_window is false"
        raise UserError(f"{where}: layer_types has sliding layers, but {fault}; give a window and true, or no such layers")
    return kinds, window


def check_request(given: dict, where: str) -> None:
    """Refuse a window that no layer would have: loaders pass it over without a word, but who asks for one wants it."""
    window = given.get("sliding_window")
    if given.get("use_sliding_window", window is not None) and not {"layer_types", "max_window_layers"} & given.keys():
        raise UserError(f"{where}: a sliding window, but no layer that has it; name the layers in layer_types")


def sliding_keys(layer_types: tuple[str, ...], window: int | None) -> dict:
    """The four keys as servers read them; all of them that know sliding drafts go by `layer_types`."""
    return {
        "layer_types": list(layer_types),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": len(layer_types),
    }
