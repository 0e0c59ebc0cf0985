"""Which part of a sample's text each of its tokens stands for.

A token alone may be no text: byte-level vocabularies split characters, and decoders look at a token's neighbours. So runs of
tokens are decoded, and each run is held against the text of the whole.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dflash_prep.tokenizer import ChatTokenizer

BROKEN = "\ufffd"  # what decoders put in the place of bytes that are no character, or not yet one


class Run(NamedTuple):
    """Neighbouring tokens of one kind: their text, whether they carry loss and whether it is one special token.

    `split`: they end inside a character, which is in the next run's text.
    """

    text: str
    loss: bool
    special: bool
    split: bool = False


def token_texts(ids: np.ndarray, tokenizer: ChatTokenizer) -> list[str]:
    """Each token's part of the text; joined they are the decoded sample.

    A character whose bytes are split over several tokens stands with the one that completes it; the others have "".
    """
    ids = ids.tolist()
    text = decode(ids, tokenizer)
    texts, taken = [], 0  # characters of `text` that tokens so far have
    # The text of ids[:settled], `known` characters, stays as it is whatever follows; ids[context:settled] are decoded
    # once more with what follows, since decoders treat the first token of all differently.
    context = settled = known = 0
    before = ""
    for number in range(len(ids)):
        said = decode(ids[context : number + 1], tokenizer)[len(before) :]
        agreed = agreement(said, text[known : known + len(said)])
        end = max(taken, known + agreed)
        texts.append(text[taken:end])
        taken = end
        if said and agreed == len(said) and not said.endswith(BROKEN):
            context, settled, known = settled, number + 1, end
            before = decode(ids[context:settled], tokenizer)
    if texts:
        texts[-1] += text[taken:]
    return texts


def agreement(one: str, other: str) -> int:
    """How many first characters two texts share."""
    differing = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def decode(ids: list[int], tokenizer: ChatTokenizer) -> str:
    """The text of tokens, special ones included."""
    return tokenizer.backend.decode(ids, skip_special_tokens=False)


def loss_mask(spans: np.ndarray, length: int) -> np.ndarray:
    """Which tokens carry loss, bool [length], from half-open spans [start, end, …]."""
    mask = np.zeros(length, bool)
    for start, end in spans.reshape(-1, 2):
        mask[start:end] = True
    return mask


def runs(ids: np.ndarray, spans: np.ndarray, tokenizer: ChatTokenizer) -> Iterator[Run]:
    """A sample's text in runs of equal loss, special tokens by themselves.

    A number for which the tokenizer has no token has no text; it stands as a special token that states the number.
    """
    tokens = zip(token_texts(ids, tokenizer), loss_mask(spans, len(ids)).tolist(), ids.tolist(), strict=True)

    def kind(numbered) -> tuple[bool, int | None]:
        number, (_, loss, token) = numbered
        return loss, number if is_special(token, tokenizer) else None

    for (loss, special), members in groupby(enumerate(tokens), kind):
        parts = [text or nameless(token, tokenizer) for _, (text, _, token) in members]
        yield Run("".join(parts), loss, special is not None, not parts[-1])


def is_special(token: int, tokenizer: ChatTokenizer) -> bool:
    """Whether a token is marked as special, or is none at all."""
    return token in tokenizer.special_ids or tokenizer.backend.id_to_token(token) is None


def nameless(token: int, tokenizer: ChatTokenizer) -> str:
    """What stands for a number that is no token; "" for one that is."""
    return f"<no token {token}>" if tokenizer.backend.id_to_token(token) is None else ""
