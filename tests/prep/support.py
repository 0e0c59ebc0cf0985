"""What several test modules build: a tokenizer, stores, corpora, and runs of the command line."""

import io
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard
from click.testing import CliRunner, Result

from dflash_prep.batching import Batches, Limits, Samples
from dflash_prep.cli import main
from dflash_prep.cost import CostModel, Price, price
from dflash_prep.manifest import Plan
from dflash_prep.plan import write_plan
from dflash_prep.pool import from_stores
from dflash_prep.sample import Outcome, Sample
from dflash_prep.scheme import PlanOptions, settle
from dflash_prep.store_writer import StoreWriter
from dflash_prep.stores import Stores

ORIGIN = {"tokenizer": {"name": "made", "fingerprint": "0" * 32}}  # what a store without a corpus says of its making
BOS, TURN, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(directory: Path, template: str | None = CHATML) -> Path:
    """Write a byte-level BPE tokenizer whose post-processor adds a BOS, as the template does too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "the user asks and the assistant answers, one line\nafter another; then 12 and 24 are added to 36. " * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[BOS, TURN, END, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END, "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def chat(*contents: str) -> list[dict]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def jsonl(conversations: Iterable[list[dict]]) -> bytes:
    """Conversations as JSONL bytes."""
    return b"".join(json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n" for messages in conversations)


def unzstd_lines(path: Path) -> list[dict]:
    """The JSON objects of a zstd-compressed JSONL file."""
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        return [json.loads(line) for line in io.TextIOWrapper(plain, encoding="utf-8", newline="\n")]


def make_store(path: Path, lengths: list[int], shard_bytes: int = 1 << 20) -> Path:
    """Write a store whose samples have the given lengths; all but a sample's first token carry loss."""
    path.mkdir(parents=True)
    writer = StoreWriter(path, shard_bytes=shard_bytes)
    for number, length in enumerate(lengths):
        add(writer, (np.arange(length) * 7 + number) % 300, [1, length], "made", number + 1)
    writer.finish(ORIGIN)
    return path


def add(writer: StoreWriter, ids, spans, source: str, line: int) -> None:
    """Give one sample to a writer."""
    writer.take(Outcome(source, line, (Sample.of(np.array(ids, np.int64), np.array(spans, np.int64)),)))


def run(*arguments: object) -> Result:
    """Run `dflash-prep` in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_user_error(result: Result, *words: str) -> None:
    """Exit code 1 and exactly one line on standard error, which begins with "error:" and holds every word."""
    assert result.exit_code == 1, (result.exit_code, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def planning_samples(lengths: Iterable[int], most_anchors: int = 512) -> Samples:
    """Samples of the given lengths with a quarter of their tokens as anchors."""
    length = np.array(list(lengths), np.int64)
    return Samples(length, length - 1, np.minimum(-(-(length - 2).clip(0) // 4), most_anchors))


def make_plan(stores: Path | list[Path], output: Path, **options) -> Plan:
    """Write a plan of one or several stores and open it."""
    chosen = PlanOptions(**options)
    paths = stores if isinstance(stores, list) else [stores]
    write_plan(settle(from_stores(Stores(paths), chosen.holdout > 0), chosen), output)
    return Plan(output)


def price_for(samples: Samples, limits: Limits, model: CostModel | None = None) -> Price:
    """The integers of a cost model for these samples and limits."""
    longest, anchors = int(samples.length.max()), min(limits.anchors, limits.tokens)
    return price(model or CostModel(), limits.tokens, longest, anchors, int(samples.anchors.max()), max(len(samples), 1_000))


def groups_of(batches: Batches) -> list[list[int]]:
    """The samples of each micro-batch."""
    bounds = batches.offsets.tolist()
    return [batches.samples[start:end].tolist() for start, end in pairwise(bounds)]


def group_tokens(group: list[int], samples: Samples, packed: bool, align: int = 1) -> int:
    """What a micro-batch computes, by the contract: the flat row, or rows times the longest, each width a multiple."""
    lengths = [int(samples.length[sample]) for sample in group]
    width = -(-(sum(lengths) if packed else max(lengths)) // align) * align
    return width if packed else len(lengths) * width


def assert_within(groups: Iterable[list[int]], samples: Samples, limits: Limits, packed: bool = False) -> None:
    """No micro-batch is empty or above a budget."""
    for group in groups:
        assert len(group) > 0
        assert group_tokens(group, samples, packed, limits.align) <= limits.tokens
        assert sum(int(samples.anchors[sample]) for sample in group) <= limits.anchors
