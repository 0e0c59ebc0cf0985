"""Make the demo corpus again: `python data/make_demo.py` writes demo.jsonl.zst and eval.jsonl beside this script.

The prompts come from demo_prompts.py and are answered greedily by the default target. An answer stays only if it ended
by itself within its cap, is no loop and reads back from its text as the very tokens that were decoded; otherwise its
turn is left out, and the whole conversation if it is the first turn.
"""

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import zstandard
from demo_prompts import conversations, eval_prompts
from prompts_phrasings import CAPS
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_prep.embedded import default_target

HERE = Path(__file__).parent
SLOTS = 64  # conversations decoded side by side
GROWTH = 128  # positions by which the KV cache grows
LENGTH = 2600  # tokens that a conversation may have, template included
DISTINCT = 0.5  # the least share of distinct 4-grams of an answer that is no loop
OVERLAP = 13  # words in a row that no eval prompt may share with the corpus


@dataclass
class Conversation:
    """One conversation on its way: the user turns to ask, the messages so far and the tokens of the answer at hand."""

    source: str
    turns: list[str]
    system: str | None = None
    messages: list[dict] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    asked: int = 0

    def key(self) -> str:
        return json.dumps([self.source, self.system, self.turns])

    def expected(self) -> int:
        """A rough length by which to sort, so that conversations decoded together are about equally long."""
        return sum(len(turn) // 4 for turn in self.turns) + len(self.turns) * CAPS[self.source] // 2


class Decoder:
    """Llama's forward pass for a batch of rows of unequal length, with its own KV cache, in bfloat16.

    Attention is matmul and softmax written out: for one query a row, PyTorch's fused CPU kernel is several times
    slower. The cache is used over its whole length, masked, and grows when need be: every matmul would copy a slice.
    """

    def __init__(self, directory: Path):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        config = model.config
        self.heads, self.groups, self.eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        self.size = config.hidden_size // self.heads
        self.embedding = model.model.embed_tokens.weight.data
        self.head = model.lm_head.weight.data
        self.norm = model.model.norm.weight.data
        self.layers = [self.fused(layer) for layer in model.model.layers]
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(LENGTH + GROWTH)[None])
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]
        self.length = GROWTH
        empty = torch.zeros(SLOTS, self.groups, self.length, self.size, dtype=torch.bfloat16)
        self.keys, self.values = ([empty.clone() for _ in self.layers] for _ in range(2))

    @staticmethod
    def fused(layer: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        """A layer's weights, those that read the same input joined into one matrix."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return tuple(w.data for w in (norms[0], qkv, attention.o_proj.weight, norms[1], up, mlp.down_proj.weight))

    def rotate(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[at] + torch.cat([-b, a], dim=-1) * self.sin[at]

    def attend(self, qkv: torch.Tensor, layer: int, rows: slice, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Put the new keys and values into the cache and attend to all of each row's positions that `mask` allows."""
        count, new = at.shape
        qkv = qkv.view(count, new, -1, self.size)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], dim=2)
        where = torch.arange(rows.start, rows.stop)[:, None], at
        keys, values = self.keys[layer], self.values[layer]
        keys.transpose(1, 2)[where], values.transpose(1, 2)[where] = self.rotate(k, at), v
        # The query heads of one key-value head lie side by side as more queries of the same keys.
        q = self.rotate(q, at).view(count, new, self.groups, -1, self.size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (q @ keys[rows].transpose(-1, -2)).unflatten(2, (-1, new)) * self.size**-0.5 + mask
        out = scores.softmax(-1).flatten(2, 3) @ values[rows]
        return out.view(count, self.groups, -1, new, self.size).permute(0, 3, 1, 2, 4).reshape(count, new, -1)

    @torch.inference_mode()
    def next_tokens(self, tokens: torch.Tensor, rows: slice, starts: torch.Tensor) -> list[int]:
        """Feed each row its new tokens, the first at position `starts`, and return each row's likeliest next token."""
        at = starts[:, None] + torch.arange(tokens.shape[1])
        while at.max() >= self.length:
            self.length += GROWTH
            self.keys, self.values = ([F.pad(x, (0, 0, 0, GROWTH)) for x in cache] for cache in (self.keys, self.values))
        future = torch.arange(self.length) > at[..., None]
        mask = torch.zeros(future.shape, dtype=torch.bfloat16).masked_fill_(future, -torch.inf)[:, None, None]
        x, width = self.embedding[tokens], self.embedding.shape[1:]
        for layer, (norm, qkv, out, norm2, up, down) in enumerate(self.layers):
            joined = F.linear(F.rms_norm(x, width, norm, self.eps), qkv)
            x = x + F.linear(self.attend(joined, layer, rows, at, mask), out)
            gate, value = F.linear(F.rms_norm(x, width, norm2, self.eps), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(F.rms_norm(x[:, -1], width, self.norm, self.eps), self.head).argmax(-1).tolist()

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row of the cache over another, so that the rows in use stay side by side."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]


def is_loop(answer: list[int]) -> bool:
    grams = list(zip(*(answer[i:] for i in range(4)), strict=False))
    return len(grams) > 20 and len(set(grams)) < DISTINCT * len(grams)


class Writer:
    """Decodes conversations side by side: a slot that becomes free takes the next waiting conversation."""

    def __init__(self, directory: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.decoder = Decoder(directory)
        self.active: list[Conversation] = []

    def render(self, messages: list[dict], prompt: bool = False) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)

    def ask(self, talk: Conversation, slot: int) -> bool:
        """Put the next user turn into a slot; False when no turn is left that fits."""
        if not talk.messages and talk.system:
            talk.messages.append({"role": "system", "content": talk.system})
        if talk.asked == len(talk.turns):
            return False
        talk.messages.append({"role": "user", "content": talk.turns[talk.asked]})
        talk.asked += 1
        cached, talk.prompt = talk.prompt + talk.answer[:-1], self.render(talk.messages, prompt=True)
        if len(talk.prompt) >= LENGTH:
            talk.prompt, talk.answer = [], []
            return self.drop(talk, slot, "too long")
        # The turns before are in the cache already; only what follows them is fed.
        start = next((i for i, (a, b) in enumerate(zip(cached, talk.prompt, strict=False)) if a != b), len(cached))
        new = torch.tensor([talk.prompt[start:]])
        talk.answer = self.decoder.next_tokens(new, slice(slot, slot + 1), torch.tensor([start]))
        return True

    def drop(self, talk: Conversation, slot: int, fault: str) -> bool:
        """Leave the turn out and go on with the next one, unless it was the first, on which the others may build."""
        talk.faults.append(fault)
        talk.messages.pop()
        return bool(talk.messages) and talk.messages[-1]["role"] == "assistant" and self.ask(talk, slot)

    def fault(self, talk: Conversation) -> str | None:
        """What is wrong with the answer at hand, finished or not."""
        answer = talk.answer
        if answer[-1] == self.end:
            text = self.tokenizer.decode(answer[:-1])
            if is_loop(answer):
                return "loop"
            same = self.tokenizer.encode(text, add_special_tokens=False) == answer[:-1]
            return None if same and text.strip() == text != "" else "other tokens when read back"
        if len(answer) % 50 == 0 and is_loop(answer[-100:]):
            return "loop"
        if len(talk.prompt) + len(answer) + 1 >= LENGTH:
            return "too long"
        return "no end within the cap" if len(answer) >= CAPS[talk.source] else None

    def settle(self, slot: int) -> bool:
        """Bring a slot to where its answer needs another token; False when its conversation is finished."""
        talk = self.active[slot]
        while True:
            if fault := self.fault(talk):
                if not self.drop(talk, slot, fault):
                    return False
            elif talk.answer[-1] == self.end:
                talk.messages.append({"role": "assistant", "content": self.tokenizer.decode(talk.answer[:-1])})
                if not self.ask(talk, slot):
                    return False
            else:
                return True

    def write(self, waiting: list[Conversation]):
        """Yield each conversation as it finishes."""
        waiting = sorted(waiting, key=Conversation.expected, reverse=True)
        while waiting or self.active:
            while waiting and len(self.active) < SLOTS:
                talk = waiting.pop()
                self.active.append(talk)
                if not (self.ask(talk, len(self.active) - 1) and self.settle(len(self.active) - 1)):
                    yield self.active.pop()
            if not self.active:
                return
            starts = torch.tensor([len(talk.prompt) + len(talk.answer) - 1 for talk in self.active])
            tokens = torch.tensor([talk.answer[-1:] for talk in self.active])
            found = self.decoder.next_tokens(tokens, slice(0, len(tokens)), starts)
            for talk, token in zip(self.active, found, strict=True):
                talk.answer.append(token)
            for slot in reversed(range(len(self.active))):
                if not self.settle(slot):
                    yield self.active[slot]
                    last = self.active.pop()
                    if slot < len(self.active):
                        self.active[slot] = last
                        self.decoder.move(len(self.active), slot, len(last.prompt) + len(last.answer))


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + OVERLAP]) for i in range(len(words) - OVERLAP + 1)}


def check_overlap(samples: list[dict], held_out: list[dict]) -> None:
    """Fail if an eval prompt shares a run of words with the corpus."""
    corpus = set().union(*(grams(message["content"]) for sample in samples for message in sample["messages"]))
    for prompt in held_out:
        for turn in prompt["turns"]:
            if shared := grams(turn) & corpus:
                raise SystemExit(f"{prompt['id']} shares {OVERLAP} words with the corpus: {' '.join(min(shared))}")


def answered(todo: list[Conversation], cache: Path | None) -> list[Conversation]:
    """All conversations with their answers, in the order given; `cache` keeps finished ones over an interruption."""
    done: dict[str, Conversation] = {}
    if cache and cache.exists():
        talks = [Conversation(**json.loads(line)) for line in cache.read_text().splitlines()]
        done = {talk.key(): talk for talk in talks}
    missing = [talk for talk in todo if talk.key() not in done]
    start = time.perf_counter()
    for count, talk in enumerate(Writer(default_target()).write(missing) if missing else (), 1):
        done[talk.key()] = talk
        if cache:
            kept = {name: getattr(talk, name) for name in ("source", "turns", "system", "messages", "faults")}
            with cache.open("a") as file:
                file.write(json.dumps(kept) + "\n")
        if count % 50 == 0 or count == len(missing):
            print(f"{count}/{len(missing)} conversations, {time.perf_counter() - start:.0f} s", flush=True)
    return [done[talk.key()] for talk in todo]


def report(talks: list[Conversation], samples: list[dict], tokenizer) -> None:
    """Print what was left out and how long the samples are, in tokens of the rendered conversation."""
    lost = [talk for talk in talks if not any(m["role"] == "assistant" for m in talk.messages)]
    print("conversations left out:", dict(Counter(talk.faults[0] for talk in lost)))
    later = Counter(fault for talk in talks if talk not in lost for fault in talk.faults)
    print("later turns left out:", dict(later))
    print("samples:", len(samples), dict(Counter(sample["source"] for sample in samples)))
    lengths = sorted(
        len(tokenizer.apply_chat_template(sample["messages"], return_dict=False, tokenize=True)) for sample in samples
    )
    at = {percent: lengths[round(percent / 100 * (len(lengths) - 1))] for percent in (0, 5, 25, 50, 75, 95, 100)}
    answers = [m["content"] for sample in samples for m in sample["messages"] if m["role"] == "assistant"]
    # Every answer's end-of-turn token counts as written, too.
    written = sum(len(ids) + 1 for ids in tokenizer(answers, add_special_tokens=False)["input_ids"])
    print(f"tokens: {sum(lengths)} in all, {written} in {len(answers)} answers; percentiles of the length: {at}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (default: beside this script)")
    parser.add_argument("--cache", type=Path, help="file that keeps finished conversations over an interruption")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    talks = answered([Conversation(**prompt) for prompt in conversations()], args.cache)
    kept = [talk for talk in talks if any(m["role"] == "assistant" for m in talk.messages)]
    random.Random(0).shuffle(kept)  # mix the kinds
    samples = [{"id": f"demo-{i:05}", "source": t.source, "messages": t.messages} for i, t in enumerate(kept, 1)]
    held_out = [{"id": f"eval-{i:03}", **prompt} for i, prompt in enumerate(eval_prompts(), 1)]
    check_overlap(samples, held_out)
    report(talks, samples, AutoTokenizer.from_pretrained(default_target()))
    packed = zstandard.compress("".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples).encode(), 19)
    (args.out / "demo.jsonl.zst").write_bytes(packed)
    lines = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in held_out)
    (args.out / "eval.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
