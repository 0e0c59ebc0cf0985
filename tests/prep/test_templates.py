"""Real models' templates and tokenizers: ids as transformers makes them, loss on just what the assistant says.

The oracle for the ids is transformers. For the loss it is what a pattern made for the template finds in the text, which is
sound since no content here spells a special token, or transformers' mask where the template has {% generation %} tags.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import cycle
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from dflash_prep.chat import ChatTemplate
from dflash_prep.errors import Reject
from dflash_prep.formats import message
from dflash_prep.tokenize import loss_spans
from dflash_prep.tokenizer import load_tokenizer
from tests.prep import models
from tests.prep.support import chat

transformers = pytest.importorskip("transformers")
render_jinja_template = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template


class Dialect(NamedTuple):
    """A tokenizer, a template (None: its own), and patterns of what comes before the assistant speaks and of how it ends."""

    tokenizer: str
    template: str | None
    opening: str = ""
    rest: str = ""  # what it says, and the token that ends it

    def __str__(self) -> str:
        return f"{self.tokenizer}-{(self.template or 'own').replace('/', '-')}"


CHATML = r"<\|im_start\|>assistant\n", r"(.*?)(<\|im_end\|>)"
LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"(.*?)(<\|eot_id\|>)"
GEMMA = r"<start_of_turn>model\n", r"(.*?)(<end_of_turn>)"
# After a tool's output no header is written; a message with one call alone is never ended
DEEPSEEK = "<｜Assistant｜>|<｜tool▁outputs▁end｜>", "(.*?)(<｜end▁of▁sentence｜>|(?=<｜tool▁outputs▁begin｜>))"
# No header at all: the assistant speaks wherever nobody else does
MISTRAL = r"(?<=\[/INST\])|(?<=\[/TOOL_RESULTS\])|(?<=\[/SYSTEM_PROMPT\])|(?<=</s>)", r"(?! ?\[[ASI]|\[TOOL_R|$)(.*?)(</s>)"
ANALYSIS = r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant"
HARMONY = r"<\|start\|>assistant", rf"((?:{ANALYSIS})?.*?)(<\|end\|>|<\|return\|>|<\|call\|>)"
DIALECTS = [
    Dialect("smollm2", None, *CHATML),
    Dialect("qwen3", None, *CHATML),
    Dialect("qwen3", "trl/qwen2_5", *CHATML),
    Dialect("qwen3", "trl/qwen3_instruct_2507", *CHATML),
    Dialect("qwen3", "trl/qwen3_5_think", *CHATML),
    Dialect("qwen3", "trl/qwen3_5_nothink", *CHATML),
    Dialect("qwen3", "trl/qwen3_6", *CHATML),
    Dialect("llama3_1", None, *LLAMA),
    Dialect("llama3_1", "trl/llama3_1", *LLAMA),
    Dialect("llama3_1", "trl/llama3_2", *LLAMA),
    Dialect("gemma3", None, *GEMMA),
    Dialect("gemma3", "trl/gemma", *GEMMA),
    Dialect("deepseek_v3", None, *DEEPSEEK),
    Dialect("deepseek_v3", "trl/deepseekv3", *DEEPSEEK),
    Dialect("deepseek_v3", "trl/deepseek_r1_distill", *DEEPSEEK),
    Dialect("gptoss", "trl/gptoss", *HARMONY),
    Dialect("llama2", "axolotl/mistral_v1", *MISTRAL),
    Dialect("mistral", "axolotl/mistral_v2v3", *MISTRAL),
    Dialect("mistral", "axolotl/mistral_v3_tekken", *MISTRAL),
    Dialect("mistral", "axolotl/mistral_v7_tekken", *MISTRAL),
]
TAGGED = [
    Dialect("qwen3", "trl/qwen3_training"),
    Dialect("qwen3", "trl/qwen2_5_training"),
    Dialect("qwen3", "trl/qwen3_instruct_2507_training"),
    Dialect("qwen3", "trl/qwen3_5_think_training"),
    Dialect("qwen3", "trl/qwen3_6_training"),
    Dialect("qwen3", "axolotl/phi_4"),
    Dialect("llama3_1", "trl/llama3_training"),
    Dialect("gemma3", "trl/gemma_training"),
    Dialect("gemma3", "trl/gemma3_training"),
    Dialect("deepseek_v3", "trl/deepseekv3_training"),
    Dialect("deepseek_v3", "trl/deepseek_r1_distill_training"),
    Dialect("gptoss", "trl/gptoss_training"),
]

PLAIN = [
    "Where is it?",
    "In Rome.",
    "2 + 2 = 4",
    "déjà vu, 日本語 🙂‍↔️ e\u0301",
    "a\n\nb\n",
    "line\u2028line\x85",
    "<b>1</b> & 'x'",
    "x" * 40,
]
EDGES = ["", " ", "\n", "\n\n", " a", "a ", "\n\na", "a\n\n", "\t a \r\n", "\u00a0a\u3000", "\n<b>", "  two  spaces  "]
SCAFFOLD = [
    "assistant",
    "user",
    "\nassistant\n",
    "model\n",
    "system",
    "<",
    "<th",
    "<think",
    "im_end",
    "[",
    " [/",
    "{}",
    "user\nuser",
    "final",
]
THINKING = [
    "<think>\nI reason.\n</think>\n\nIt is so.",
    "<think>I reason.</think>It is so.",
    "<think>\n\n</think>\n\nNo reasons.",
    "<think></think>",
    "\n<think>\na\n\n</think>\nb</think>c",
    "No opening.</think>\n\nIt is so.",
    "<think>\nNo closing.",
    "It is so.",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} a thing.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "what"}},
                "required": ["x"],
            },
        },
    }
    for name in ("look", "buy")
]


def turns(random: Random, pool: list[str], most: int = 4, answers: list[str] | None = None) -> list[dict]:
    """A conversation whose contents come from a pool, the assistant's perhaps from another."""
    system = [{"role": "system", "content": random.choice(pool)}] if random.random() < 0.4 else []
    said = [random.choice(answers if answers and turn % 2 else pool) for turn in range(2 * random.randint(1, most))]
    return [*system, *chat(*said)]


def calling(random: Random, arguments: type) -> list[dict]:
    """A conversation in which the assistant calls functions, with arguments as JSON text or as an object."""
    messages = turns(random, PLAIN, 1)[:-1]
    for _ in range(random.randint(1, 2)):
        calls = []
        for number in range(random.choice([1, 1, 2])):
            value = '{"x": "é <b>"}' if arguments is str else {"x": "é <b>", "n": 1.5}
            function = {"name": random.choice(["look", "buy"]), "arguments": value}
            calls.append({"type": "function", "id": f"call{number:05}", "function": function})
        content = random.choice([None, "", "Let me see.", "\nWell "])
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        for call in calls:
            result = random.choice(['{"found": true}', "none", "", "a\n"])
            messages.append(
                {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": result}
            )
        if random.random() < 0.7:
            messages += [{"role": "assistant", "content": random.choice(PLAIN)}, *chat(random.choice(PLAIN))]
    return [*messages, {"role": "assistant", "content": random.choice(PLAIN)}]


def reasoning(random: Random) -> list[dict]:
    """A conversation whose assistant's reasoning has a key of its own."""
    key = random.choice(["reasoning_content", "thinking"])
    return [
        entry | ({key: random.choice(["I reason.", "\nI\n\nreason.\n", ""])} if entry["role"] == "assistant" else {})
        for entry in turns(random, PLAIN)
    ]


def strange(random: Random) -> list[dict]:
    """Roles in any order."""
    roles = random.choices(["user", "assistant", "system"], [4, 4, 1], k=random.randint(1, 6))
    return [{"role": role, "content": random.choice(PLAIN)} for role in roles]


KINDS = {
    "one turn": lambda random: turns(random, PLAIN, 1),
    "many turns": lambda random: turns(random, PLAIN, 6),
    "edges": lambda random: turns(random, EDGES),
    "scaffold": lambda random: turns(random, SCAFFOLD),
    "repeats": lambda random: turns(random, [random.choice(PLAIN + EDGES + SCAFFOLD)]),
    "thinking": lambda random: turns(random, PLAIN, answers=THINKING),
    "reasoning": reasoning,
    "tools": lambda random: calling(random, dict),
    "tools with JSON text": lambda random: calling(random, str),
    "strange roles": strange,
}
ENDINGS = ["<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<｜Assistant｜>"]
CASES = 20  # conversations of a kind
KWARGS = [{}, {"enable_thinking": False}, {"enable_thinking": True}]


def conversations(kind: str, count: int) -> Iterator[tuple[list[dict], list | None, dict]]:
    """Messages, tools and arguments of the template."""
    random = Random(kind)
    for number, arguments in zip(range(count), cycle(KWARGS)):
        tools = TOOLS if "tools" in kind and number % 4 else None
        yield KINDS[kind](random), tools, arguments if random.random() < 0.8 else {}


@cache
def loaded(name: str):
    """A tokenizer as this project and as transformers loads it."""
    directory = models.model(name)
    # transformers' LlamaTokenizer takes tokenizer.json's words but not its normaliser: here the file shall speak for itself
    kind = transformers.PreTrainedTokenizerFast if name == "llama2" else transformers.AutoTokenizer
    return load_tokenizer(str(directory)), kind.from_pretrained(directory)


class Speaker:
    """One dialect, spoken by both."""

    def __init__(self, dialect: Dialect):
        self.dialect = dialect
        self.tokenizer, self.reference = loaded(dialect.tokenizer)
        self.template = models.template(dialect.template) if dialect.template else self.tokenizer.template
        templated = replace(self.tokenizer, template=self.template)
        self.templates = [(arguments, ChatTemplate(templated, arguments)) for arguments in KWARGS]

    def expected(self, messages: list[dict], tools: list | None, arguments: dict, **options):
        """What transformers makes of a conversation; None where its template refuses it."""
        try:
            return self.reference.apply_chat_template(
                messages, tools=tools, chat_template=self.template, **{"tokenize": False} | options, **arguments
            )
        except Exception:  # a template may raise anything
            return None

    def rendered(self, messages: list[dict], tools: list | None, arguments: dict) -> tuple[str | None, list[dict]]:
        """The text, and the messages as they must be told to get it: many templates refuse null contents."""
        text = self.expected(messages, tools, arguments)
        if text is None:
            messages = [entry | {"content": entry["content"] or ""} for entry in messages]
            text = self.expected(messages, tools, arguments)
        return text, messages

    def ours(self, messages: list[dict], tools: list | None, arguments: dict, loss: str = "assistant") -> tuple[list, list]:
        """Ids and loss mask as `dflash-prep tokenize` makes them."""
        template = next(template for given, template in self.templates if given == arguments)
        conversation = template.conversation([*map(message, messages)], tools, loss)
        encoding = self.tokenizer.encoder.encode_batch([conversation.text], add_special_tokens=False)[0]
        ids, spans = loss_spans(encoding, conversation, self.tokenizer.special_ids)
        mask = np.zeros(len(ids), bool)
        for start, end in spans.reshape(-1, 2):
            mask[start:end] = True
        return ids.tolist(), mask.tolist()

    def places(self, text: str, arguments: dict) -> list[tuple[int, int, int]]:
        """Where the assistant begins to speak in each of its turns, where it ends, and where the token that ends it does."""
        opening, rest = self.dialect.opening, self.dialect.rest
        prompt = self.expected(chat("a"), None, arguments, add_generation_prompt=True)
        given = re.split(opening, prompt)[
            -1
        ]  # what the generation prompt says for the assistant, an empty thinking block, say
        found = []
        for turn in re.finditer(f"(?:{opening}){rest}", text, re.DOTALL):
            start = turn.start(1) + (len(given) if turn[1].startswith(given) else 0)
            found.append((start, turn.end(1), turn.end(2)))
        return found

    def blocks(self, messages: list[dict], tools: list | None, arguments: dict) -> list[tuple[int, int, int]]:
        """The same of a template's {% generation %} blocks, in which the token that ends a turn is included."""
        stated = [{key: value for key, value in entry.items() if value is not None} for entry in messages]
        _, blocks = render_jinja_template(
            [stated],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.reference.special_tokens_map,
            **arguments,
        )
        return [(start, end, end) for start, end in blocks[0] if start < end]

    def mask(self, text: str, places: list[tuple[int, int, int]]) -> list[bool]:
        """Which tokens of a text lie in these places."""
        encoding = self.reference(text, add_special_tokens=False, return_offsets_mapping=True)
        return [
            any((start <= first and last <= end) or (first == end and last == closed) for start, end, closed in places)
            for first, last in encoding["offset_mapping"]
        ]


def answers_of(messages: list[dict]) -> list[dict]:
    """What the assistant says of a conversation."""
    return [entry for entry in messages if entry["role"] == "assistant"]


def is_worth(text: str | None, places: list[tuple[int, int, int]], messages: list[dict]) -> bool:
    """Whether there is something to learn, and nothing that the template leaves out of what the assistant says."""
    answers = answers_of(messages)
    if len(places) != len(answers):
        return bool(places)
    return bool(places) and all(
        names_calls(text[start:end], answer) for (start, end, _), answer in zip(places, answers, strict=True)
    )


def names_calls(said: str, answer: dict) -> bool:
    """Whether a turn as it is written names each function that its message calls, as often as it does."""
    names = [call["function"]["name"] for call in answer.get("tool_calls", [])]
    return all(said.count(name) >= names.count(name) for name in names)


speaking = cache(Speaker)


@pytest.fixture
def speaker(request) -> Speaker:
    """The two ways to speak a dialect."""
    return speaking(request.param)


def spoken(dialects: list[Dialect]):
    """Each test for each of these dialects."""
    return pytest.mark.parametrize("speaker", dialects, indirect=True, ids=str)


@spoken(DIALECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers_and_loss_is_on_what_the_assistant_says(speaker, kind):
    for messages, tools, arguments in conversations(kind, CASES):
        text, messages = speaker.rendered(messages, tools, arguments)
        case = messages, tools, arguments
        places = [] if text is None else speaker.places(text, arguments)
        if not is_worth(text, places, messages):
            with pytest.raises(Reject):
                speaker.ours(*case)
            continue
        if len(places) < len(answers_of(messages)):
            assert kind.startswith("tools") and speaker.dialect.opening == DEEPSEEK[0]  # which writes its header once only
            with suppress(Reject):
                assert speaker.ours(*case)[0] == speaker.expected(*case, tokenize=True, return_dict=False), case
            continue
        said = [text[start:end] for start, end, _ in places]
        ids, mask = speaker.ours(*case)
        assert ids == speaker.expected(*case, tokenize=True, return_dict=False), case
        assert mask == speaker.mask(text, places), (case, said)
        assert speaker.ours(*case, loss="last-assistant")[1] == speaker.mask(text, places[-1:]), (case, said)
        assert all(speaker.ours(*case, loss="all")[1])


@spoken(TAGGED)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_tags_say_where_loss_is(speaker, kind):
    """As transformers' mask has it, but for a token that begins before the tag: at serving the prompt is encoded alone."""
    for messages, tools, arguments in conversations(kind, CASES):
        text, messages = speaker.rendered(messages, tools, arguments)
        case = messages, tools, arguments
        blocks = [] if text is None else speaker.blocks(*case)
        if not is_worth(text, blocks, messages):
            with pytest.raises(Reject):
                speaker.ours(*case)
            continue
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = speaker.expected(*case, **options)
        ids, mask = speaker.ours(*case)
        assert ids == expected["input_ids"], case
        within = speaker.mask(text, blocks)
        straddling = [token for token, loss in enumerate(expected["assistant_masks"]) if loss != within[token]]
        assert all(ids[token] not in speaker.tokenizer.special_ids for token in straddling) and len(straddling) <= len(
            blocks
        )
        assert mask == within, (case, [text[start:end] for start, end, _ in blocks])
        if len(blocks) == len(answers_of(messages)):
            assert speaker.ours(*case, loss="last-assistant")[1] == speaker.mask(text, blocks[-1:]), case


@spoken([dialect for dialect in DIALECTS if dialect.tokenizer == "qwen3" and dialect.opening == CHATML[0]])
def test_reasoning_that_the_template_strips_is_in_neither_ids_nor_mask(speaker):
    first = {"role": "assistant", "content": "<think>\nfirst\n</think>\n\none"}
    second = {"role": "assistant", "content": "two", "reasoning_content": "second"}
    messages = [*chat("a"), first, *chat("b"), second]
    ids, mask = speaker.ours(messages, None, {})
    text = speaker.reference.decode(ids)
    said = speaker.reference.decode([token for token, loss in zip(ids, mask, strict=True) if loss])
    assert ("first" in text, "second" in text) == ("first" in said, "second" in said)
    if speaker.dialect.template in (None, "trl/qwen3_5_think", "trl/qwen3_5_nothink", "trl/qwen3_6"):
        assert "first" not in text and "second" in said
    assert said.count("<|im_end|>") == 2


@spoken(DIALECTS + TAGGED)
def test_text_that_spells_special_tokens_gives_the_ids_of_transformers_or_a_reject(speaker):
    specials = [*sorted(speaker.tokenizer.special_texts)[:6], *ENDINGS]
    random = Random(0)
    for _ in range(12):
        messages = turns(random, [*specials, *(f"{special}\nx" for special in specials), *PLAIN])
        expected = speaker.expected(messages, None, {}, tokenize=True, return_dict=False)
        try:
            ids, mask = speaker.ours(messages, None, {})
        except Reject:
            continue
        assert ids == expected
        assert any(mask)


@spoken(DIALECTS + TAGGED)
def test_what_has_no_answer_or_is_refused_by_the_template_is_rejected(speaker):
    for messages in ([], chat("a"), [{"role": "system", "content": "a"}], [*chat("a"), {"role": "tool", "content": "b"}]):
        with pytest.raises(Reject):
            speaker.ours(messages, None, {})
