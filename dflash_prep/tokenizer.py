"""A model's tokenizer and chat template, read from its directory without torch or transformers."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from dflash_prep.embedded import default_target
from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, check_regular, digest, read_json

FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer, its chat template (None if it has none) and the special tokens that templates may name."""

    name: str
    backend: Tokenizer
    template: str | None
    named_tokens: dict[str, str]

    @cached_property
    def fingerprint(self) -> str:
        """Of what decides the ids of a text: everything in tokenizer.json but truncation and padding."""
        value = json.loads(self.backend.to_str())
        decisive = {key: part for key, part in value.items() if key not in ("truncation", "padding")}
        return digest(canonical_json(decisive))

    @cached_property
    def template_fingerprint(self) -> str:
        """Of the chat template and the special tokens it may name."""
        return digest((self.template or "").encode(), canonical_json(self.named_tokens))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the tokenizer marks as special."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The tokens that the tokenizer marks as special, as text."""
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def vocabulary(self) -> int:
        """One more than the greatest token number."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def plain_encoder(self) -> Tokenizer:
        """The tokenizer as servers use it on plain text: what its post-processor adds included, nothing cut."""
        encoder = Tokenizer.from_str(self.backend.to_str())
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    @cached_property
    def encoder(self) -> Tokenizer:
        """The tokenizer as chat text needs it: nothing added, nothing cut, offsets as the text has them."""
        encoder = Tokenizer.from_str(self.plain_encoder.to_str())
        if encoder.post_processor is not None:  # would add a second BOS and trims spaces off the offsets
            encoder.post_processor = _no_post_processor()
        return encoder


def _no_post_processor():
    from tokenizers.processors import ByteLevel

    return ByteLevel(trim_offsets=False)


def load_tokenizer(name: str | None) -> ChatTokenizer:
    """Load a tokenizer by directory or hub id; None is the default target's."""
    directory = model_directory(name)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{directory}: no tokenizer.json here; name a directory or hub id with a fast tokenizer")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises bare Exception
        raise UserError(f"{path}: cannot read the tokenizer: {fault}") from None
    config = {}
    for file in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        config |= read_json(file, "tokenizer configuration") if file.exists() else {}
    return ChatTokenizer(str(name or directory.name), backend, find_template(directory, config), named_tokens(config))


def find_template(directory: Path, config: dict) -> str | None:
    """The chat template: its own file, else the configuration's, whose list of named ones has a "default"."""
    file = directory / "chat_template.jinja"
    try:
        if file.exists():
            check_regular(file)
            return file.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            template.encode()
    except UnicodeError:
        raise UserError(f"{directory}: the chat template is not UTF-8; write it anew") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{directory}: chat_template is neither text nor a list of names and templates; mend it") from None
    return template


def named_tokens(config: dict) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like as text."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def model_directory(name: str | None) -> Path:
    """Where a model's tokenizer files are: the default target's, a local directory, or a hub id's snapshot."""
    if name is None:
        return default_target()
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{name}: no such directory; name a Hugging Face directory or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as fault:  # network, authorisation, offline mode: many classes, one meaning
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise UserError(f"{name}: no such directory, and not to be had from the hub: {reason}") from None
