"""Which token stands for a masked slot: one that neither text nor template ever uses."""

import numpy as np

from dflash_prep.errors import UserError
from dflash_prep.stores import Stores
from dflash_prep.tokenizer import ChatTokenizer


def choose_mask_token(tokenizer: ChatTokenizer, store: Stores, vocabulary: int, requested: int | None) -> int:
    """The requested id, else the tokenizer's own mask token, else an unused special token, else a row above its vocabulary.

    `vocabulary` is the number of rows of the target's embedding.
    """
    if requested is not None:
        return check(requested, tokenizer, store, vocabulary)
    own = tokenizer.named_tokens.get("mask_token")
    if own is not None:
        token = tokenizer.backend.token_to_id(own)
        if token is None:
            raise UserError(f"{tokenizer.name}: its mask_token {own!r} is no token of it; name one with --mask-token-id")
        return check(token, tokenizer, store, vocabulary)
    used = set(store.manifest["special_tokens"])
    for token in sorted(tokenizer.special_ids):
        if str(token) not in used and token < vocabulary and not is_role(token, tokenizer):
            return token
    size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
    if size < vocabulary:
        return size
    raise UserError(f"{tokenizer.name}: every special token is in use; name a token for masked slots with --mask-token-id")


def is_role(token: int, tokenizer: ChatTokenizer) -> bool:
    """Whether a token has a part to play already: bos, eos, pad and the like, or a word of the chat template."""
    text = tokenizer.backend.id_to_token(token)
    return text is not None and (text in tokenizer.named_tokens.values() or text in (tokenizer.template or ""))


def check(token: int, tokenizer: ChatTokenizer, store: Stores, vocabulary: int) -> int:
    """Refuse a mask token that means something else."""
    if not 0 <= token < vocabulary:
        raise UserError(f"--mask-token-id {token}: the target's embedding has rows 0 to {vocabulary - 1}")
    text = tokenizer.backend.id_to_token(token)
    if is_role(token, tokenizer) and text != tokenizer.named_tokens.get("mask_token"):
        raise UserError(f"--mask-token-id {token}: is {text}, which the tokenizer or its template uses; choose another")
    if text is not None and any((store.sample(i)[0] == np.uint32(token)).any() for i in range(len(store))):
        raise UserError(f"--mask-token-id {token}: {text!r} occurs in the store's text; choose another")
    return token
