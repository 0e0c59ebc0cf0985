"""The prompts of the demo corpus: subjects put into task phrasings, kind by kind, always in the same order."""

import random
from collections.abc import Iterator

from prompts_phrasings import (
    ACTIVITY_TURNS,
    ARTICLE_TURNS,
    CONCEPT_TURNS,
    MATH,
    MESSAGE_TASKS,
    NAMES,
    PASSAGE_TASKS,
    PHRASINGS,
    PLACE_TURNS,
    STORY_TURNS,
    SYSTEMS,
    TEXT_TURNS,
    THINGS,
)
from prompts_subjects import (
    ACTIVITIES,
    CHARACTERS,
    CONCEPTS,
    ESSAYS,
    FUNCTIONS,
    PAIRS,
    PLACES,
    QUICK,
    SITUATIONS,
    SNIPPETS,
    TABLES,
)
from prompts_texts import EVAL_MESSAGES, EVAL_PASSAGES, MESSAGES, PASSAGES


def phrased(kind: str, subjects: list[str], times: int) -> Iterator[dict]:
    """Each subject in `times` phrasings of its kind, another choice of them from subject to subject."""
    phrasings = PHRASINGS[kind]
    for i, subject in enumerate(subjects):
        for j in range(times):
            yield {"source": kind, "turns": [phrasings[(i + j) % len(phrasings)].format(subject)]}


def quick() -> Iterator[dict]:
    """Questions that one word or one sentence answers."""
    for question in QUICK:
        yield {"source": "qa-short", "turns": [question]}
    for i, place in enumerate(PLACES):
        yield {"source": "qa-short", "turns": [f"Answer with one word: what is the capital of {place}?"]}
        yield {
            "source": "qa-short",
            "turns": [f"On which continent is {place}?", "Name one of its cities."][: 1 + i % 2],
        }
    for concept in CONCEPTS:
        yield {"source": "qa-short", "turns": [f"What is {concept}? Answer in one sentence."]}


def math(rng: random.Random) -> Iterator[dict]:
    """Word problems with numbers that are drawn anew for each."""
    for i in range(7 * len(MATH)):
        template, a, b = MATH[i % len(MATH)], rng.randint(3, 12), rng.randint(2, 7)
        words = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS), "a": a, "b": b, "c": rng.randint(4, 12) * 5}
        yield {"source": "math", "turns": [template.format(**words)]}


def snippets() -> Iterator[dict]:
    for code in SNIPPETS.values():
        yield {"source": "code", "turns": [f"What does this Python code do?\n\n```python\n{code}\n```"]}
        yield {
            "source": "code",
            "turns": [f"Add comments to this code:\n\n```python\n{code}\n```", "Thanks. Is it fast?"],
        }


def texts() -> Iterator[dict]:
    """Messages to rewrite and passages to summarise, some with further questions, some several at once."""
    for i, text in enumerate(MESSAGES.values()):
        for j in range(3):
            yield {"source": "rewrite", "turns": [f"{MESSAGE_TASKS[(i + 2 * j) % len(MESSAGE_TASKS)]}\n\n{text}"]}
        if i % 3 == 0:
            yield {"source": "rewrite", "turns": [text], "system": SYSTEMS[1]}
    passages = list(PASSAGES.values())
    for i, text in enumerate(passages):
        for j in range(2):
            yield {"source": "summarize", "turns": [f"{PASSAGE_TASKS[(i + j) % len(PASSAGE_TASKS)]}\n\n{text}"]}
        more = [TEXT_TURNS[(i + 3 * j) % len(TEXT_TURNS)] for j in range(3 + i % 6)]
        yield {"source": "summarize", "turns": [f"{PASSAGE_TASKS[(i + 3) % len(PASSAGE_TASKS)]}\n\n{text}", *more]}
        several = passages[i:] + passages[:i]
        several = "\n\n".join(several[: 3 + i % 4])
        yield {
            "source": "summarize",
            "turns": [f"{several}\n\nSummarize each of these texts in one sentence.", more[0]],
        }


def tables(rng: random.Random) -> Iterator[dict]:
    """Tables of made-up numbers with questions about them."""
    months = ["January", "February", "March", "April", "May", "June", "July", "August"]
    for i, (title, (column, rows)) in enumerate(TABLES.items()):
        for width in (3, 6 + i % 3):
            head = f"| {column} | " + " | ".join(months[:width]) + " |\n" + "|---" * (width + 1) + "|\n"
            body = "\n".join(
                f"| {row} | " + " | ".join(str(rng.randint(10, 99)) for _ in range(width)) + " |" for row in rows
            )
            first = f"Here is a table of the {title}:\n\n{head}{body}\n\nDescribe in two sentences what the table shows."
            more = [f"What was the number for {rows[0]} in March?", f"Write the row for {rows[1]} as a sentence."]
            yield {"source": "summarize", "turns": [first, *more[: i % 3]]}


def talks(rng: random.Random) -> Iterator[dict]:
    """Conversations of two to fourteen turns: an opening on a subject, then questions in a drawn order."""
    openings = (
        (CONCEPTS, "What is {}? Answer in two or three sentences.", CONCEPT_TURNS),
        (ACTIVITIES, "Give me some advice on {} in three sentences.", ACTIVITY_TURNS),
        (PLACES, "I would like to travel to {}. Tell me about it in three sentences.", PLACE_TURNS),
        (CHARACTERS, "Write the beginning of a story about {}. Four sentences, please.", STORY_TURNS),
    )
    for subjects, opening, turns in openings:
        for i, subject in enumerate(subjects):
            count = (1, 2, 4, 3, 1, 7, 2, 5, 3, 14, 1, 9)[i % 12]
            more = rng.sample(turns, min(count, len(turns)))
            talk = {"source": "dialogue", "turns": [opening.format(subject), *more]}
            yield {**talk, "system": SYSTEMS[2 if subjects is PLACES else 0]} if i % 14 == 13 else talk
    for i, situation in enumerate(SITUATIONS):
        more = ["Make it a little shorter.", "Now write the answer that I may get.", "Thanks! Which subject line fits?"]
        yield {"source": "dialogue", "turns": [f"Help me to {situation}. Write a short text.", *more[: 1 + i % 3]]}


def long_talks(rng: random.Random) -> Iterator[dict]:
    """The longest conversations: many questions on two subjects, or on several passages at once."""
    for i in range(30):
        first = f"I have two subjects today. The first is {CONCEPTS[3 * i + 2]}. Describe it in one paragraph."
        second = f"Now to the second subject: {ACTIVITIES[2 * i]}. What should I know about it?"
        turns = [first, *rng.sample(CONCEPT_TURNS, 8), second, *rng.sample(ACTIVITY_TURNS, 8)]
        yield {"source": "dialogue", "turns": turns}
    passages = list(PASSAGES.values())
    for count in (4, 5, 6, 7) * 6 + (9, 10) * 2 + (11, 12) * 5:
        articles = "\n\n".join(rng.sample(passages, count))
        first = f"Here are some articles.\n\n{articles}\n\nSummarize the last article in one sentence."
        yield {"source": "dialogue", "turns": [first, *rng.sample(ARTICLE_TURNS, 5)]}


def conversations() -> Iterator[dict]:
    rng = random.Random(1)
    yield from quick()
    yield from phrased("explain", CONCEPTS, 2)
    yield from phrased("list", ACTIVITIES, 2)
    yield from phrased("story", CHARACTERS, 2)
    yield from phrased("email", SITUATIONS, 2)
    yield from phrased("code", FUNCTIONS, 2)
    yield from snippets()
    yield from math(rng)
    yield from phrased("compare", PAIRS, 2)
    yield from phrased("howto", ACTIVITIES, 1)
    yield from phrased("longform", ESSAYS, 3)
    yield from texts()
    yield from tables(rng)
    yield from talks(rng)
    yield from long_talks(rng)


def eval_prompts() -> list[dict]:
    """Held-out prompts: the same kinds of tasks on other subjects."""
    lamp, lake, course, bridge = EVAL_PASSAGES.values()
    trip, wood = EVAL_MESSAGES.values()
    prompts = (
        ("qa-short", "Answer with one word: what is the capital of Denmark?"),
        ("qa-short", "What is a tide? Answer in one sentence."),
        ("qa-short", "How many players are in a volleyball team?"),
        ("qa-short", "What is a lighthouse? Answer in one sentence."),
        ("qa-short", "Which animal is known for its black and white stripes?"),
        ("explain", "Write a short paragraph about wind turbines."),
        ("explain", "Explain osmosis to a beginner in three or four sentences."),
        ("explain", "Why does punctuality matter? Answer in one paragraph."),
        ("explain", "Give a definition of a monopoly and one example."),
        ("explain", "How would you explain a rainbow to a child? Keep it short."),
        ("explain", "What is meant by peer pressure? Answer in two sentences."),
        ("list", "Give me three tips for writing a thank-you card."),
        ("list", "Write a checklist of five steps for cleaning a fish tank."),
        ("list", "Name four common mistakes in skiing."),
        ("list", "What are three benefits of taking a daily walk? Use bullet points."),
        ("story", "Write a story of five sentences about a penguin who opens a bakery."),
        ("story", "Write the first paragraph of a story about a haunted elevator."),
        ("story", "Suggest three titles for a story about a spider who knits scarves."),
        ("email", "Write a short email to ask a museum about group discounts."),
        ("email", "Write a friendly message of three sentences to invite a cousin to a picnic."),
        ("email", "Draft a polite, formal email to return a pair of shoes. Keep it under 100 words."),
        ("code", "Write a Python function that counts the capital letters in a string."),
        ("code", "Write a Python function that returns the smallest number in a list."),
        ("code", "Show me a Python function that converts miles to kilometers and explain it in two sentences."),
        (
            "code",
            "What does this Python code do?\n\n```python\nfor i in range(3, 0, -1):\n    print(i)\nprint('Go!')\n```",
        ),
        ("math", "Kofi buys 8 lemons for 3 dollars each. How much does Kofi pay?"),
        ("math", "A train travels 60 kilometers in one hour. How far does it travel in 4 hours?"),
        ("math", "Lily has 45 beads and loses 17 of them. How many beads does she still have?"),
        ("compare", "What is the difference between a turtle and a tortoise? Answer in two sentences."),
        ("compare", "Compare skiing and snowboarding in one paragraph."),
        ("compare", "Name two similarities and two differences between a piano and an organ."),
        ("howto", "How should I begin with knitting a scarf? Explain in one paragraph."),
        ("howto", "I need help with planting a tree. Give me a step-by-step guide with short steps."),
        ("howto", "Write a plan for one week of learning to juggle, with one line for each day."),
        ("longform", "Write a guide on how to photograph birds, with a heading for each part."),
        ("longform", "Explain how a small theater can win new audiences. Write about 250 words."),
        ("rewrite", f"Rewrite this message in a friendly tone:\n\n{trip}"),
        ("rewrite", f"Rewrite this message so that it is polite and professional:\n\n{wood}"),
        ("summarize", f"Summarize the following text in two sentences.\n\n{lamp}"),
        ("summarize", f"List the main points of the following text.\n\n{lake}"),
        ("summarize", f"Write a one-sentence summary of this text.\n\n{course}", "Suggest a title for the text."),
        ("summarize", f"What is the main idea of this text?\n\n{bridge}", "Name three key words."),
        ("dialogue", "What is a black hole? Answer in two or three sentences.", "Why are scientists interested in it?"),
        ("dialogue", "Give me some advice on pottery in three sentences.", "What do I need to buy first?"),
        ("dialogue", "I would like to travel to Iceland. What is it known for?", "What should I pack?"),
        ("dialogue", "What is jazz? Answer in two or three sentences.", "List three facts about it."),
        ("dialogue", "Help me to ask a florist for a bouquet. Write a short text.", "Make it a little shorter."),
        (
            "dialogue",
            "Write the beginning of a story about a talking teapot. Four sentences, please.",
            "Write an ending.",
        ),
    )
    return [{"source": kind, "turns": turns} for kind, *turns in prompts]
