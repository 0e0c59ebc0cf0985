"""Text from anywhere, such as names, a server's words or a corpus, with nothing in it that a terminal would obey."""

import re

# Control characters but for tab and newline; what reorders or hides text, or breaks lines; lone surrogates.
HIDDEN = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u2069\\u3164\\ufeff"
    "\\ufff9-\\ufffb\\ud800-\\udfff\\U000e0000-\\U000e007f"
)
HIDDEN_IN_LINE = re.compile(f"[{HIDDEN}\t\n]")


def escaped(character: str) -> str:
    """A character as an escape of ASCII characters."""
    return character.encode("unicode_escape").decode()


def in_line(text: object) -> str:
    """A text as it may stand inside a line, what would not be seen or would be obeyed escaped."""
    return HIDDEN_IN_LINE.sub(lambda found: escaped(found[0]), str(text))
