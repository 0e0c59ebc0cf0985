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
FILES += ["additional_chat_templates/*.jinja"]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer, its chat template (None if it has none) and the special tokens that templates may name.

    `tool_template` is a template of its own for conversations that offer tools, where a tokenizer has one.
    """

    name: str
    backend: Tokenizer
    template: str | None
    named_tokens: dict[str, str]
    tool_template: str | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Of what decides the ids of a text: everything in tokenizer.json but truncation and padding."""
        value = json.loads(self.backend.to_str())
        decisive = {key: part for key, part in value.items() if key not in ("truncation", "padding")}
        return digest(canonical_json(decisive))

    @cached_property
    def template_fingerprint(self) -> str:
        """Of the chat templates and the special tokens they may name."""
        tools = [self.tool_template.encode()] if self.tool_template else []
        return digest((self.template or "").encode(), canonical_json(self.named_tokens), *tools)

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
    def most_characters(self) -> int | None:
        """The most characters, white space aside, that one token can stand for; None where there may be no such bound."""
        if self.backend.normalizer is not None or getattr(self.backend.model, "unk_token", None) is not None:
            return None
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

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


def load_tokenizer(name: str | None, chat_template: str | None = None) -> ChatTokenizer:
    """Load a tokenizer by directory or hub id; None is the default target's.

    `chat_template` is a file to take the template from instead, or the name of one of the tokenizer's own.
    """
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
    templates = own_templates(directory, config)
    if chat_template is not None:
        templates = {"default": chosen_template(chat_template, templates)}
    default, with_tools = templates.get("default"), templates.get("tool_use")
    return ChatTokenizer(str(name or directory.name), backend, default, named_tokens(config), with_tools)


def own_templates(directory: Path, config: dict) -> dict[str, str]:
    """A tokenizer's chat templates by name: from files of their own, else from the configuration; one alone is "default"."""
    try:
        files = {file.stem: file for file in sorted(directory.glob("additional_chat_templates/*.jinja"))}
        if (directory / "chat_template.jinja").exists():
            files["default"] = directory / "chat_template.jinja"
        if files:
            return {name: read_template(file) for name, file in files.items()}
        templates = config.get("chat_template")
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        elif templates is not None:
            templates = {"default": templates}
        for template in (templates or {}).values():
            template.encode()
    except UnicodeError:
        raise UserError(f"{directory}: the chat template is not UTF-8; write it anew") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{directory}: chat_template is neither text nor a list of names and templates; mend it") from None
    return templates or {}


def read_template(file: Path) -> str:
    """A chat template's text."""
    check_regular(file)
    return file.read_text(encoding="utf-8")


def chosen_template(choice: str, templates: dict[str, str]) -> str:
    """The template that --chat-template means: one of the tokenizer's by name, or a file's."""
    if choice in templates:
        return templates[choice]
    if not Path(choice).exists():
        own = f"; the tokenizer's own are {', '.join(sorted(templates))}" if templates else ""
        raise UserError(f"{choice}: no such file to take the chat template from{own}")
    try:
        return read_template(Path(choice))
    except UnicodeError:
        raise UserError(f"{choice}: the chat template is not UTF-8; write it anew") from None
    except OSError as fault:
        raise UserError(f"{choice}: cannot read the chat template: {fault.strerror}") from None


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
