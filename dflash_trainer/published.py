"""Other people's drafts of the same layout: what their `config.json` leaves out or says elsewhere, and what is refused.

What is left out means what it means to z-lab's loader, that is to transformers' Qwen3 configuration. Keys that change
nothing here are passed over; those that make another model of the same tensors are refused.
"""

from dflash_prep.errors import UserError
from dflash_trainer.sliding import SLIDING

OMITTED = {"block_size": 16, "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": None}
OMITTED |= {"use_sliding_window": False, "max_window_layers": 28}
# Keys of single loaders that scale, clip or extend what a draft computes, and the values that do not.
NEUTRAL = {
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "attention_sink_bias": (None, False),
}


def completed(given: dict, where: str) -> dict:
    """A draft's flat configuration with what it leaves out; `where` it comes from."""
    return OMITTED | given | rotary_base(given, where)


def rotary_base(given: dict, where: str) -> dict:
    """`rope_theta`, at whichever places it is said, if the angles are plain ones: no scaling, and all of a head turned."""
    found = [given["rope_theta"]] if "rope_theta" in given else []
    for key in ("rope_parameters", "rope_scaling"):
        rope = {} if given.get(key) is None else given[key]
        plain = isinstance(rope, dict) and all(
            value is None or name == "rope_theta" or (name in ("rope_type", "type") and value == "default")
            for name, value in rope.items()
        )
        if not plain:
            raise UserError(f"{where}: {key} is {rope}, but a draft has plain rotary angles; start from another one")
        found += [rope["rope_theta"]] if rope.get("rope_theta") is not None else []
    if any(base != found[0] for base in found):
        raise UserError(
            f"{where}: rope_theta is {found[0]}, and another at rope_parameters or rope_scaling: make them agree"
        )
    return {"rope_theta": found[0]} if found else {}


def check_computable(given: dict, layer_types: tuple[str, ...], where: str) -> None:
    """Refuse what makes another model of the same tensors."""
    for key, neutral in NEUTRAL.items():
        if given.get(key) not in neutral:
            raise UserError(f"{where}: {key} is {given[key]}, which a draft here does not have; start from another one")
    for key in ("causal", "is_causal"):
        said = given.get(key)
        if said is not None and any(said != (kind == SLIDING) for kind in layer_types):
            raise UserError(
                f"{where}: {key} is {said}, but blocks here are causal in sliding layers and in no other; "
                "start from another draft"
            )
