"""The prompts of the demo corpus: subjects put into task phrasings, kind by kind, always in the same order."""

import random
from collections.abc import Iterator

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

# The most tokens that an answer of each kind may have.
CAPS = {
    "qa-short": 150,
    "explain": 400,
    "list": 400,
    "story": 400,
    "email": 400,
    "code": 500,
    "math": 400,
    "rewrite": 300,
    "summarize": 300,
    "compare": 400,
    "howto": 600,
    "dialogue": 400,
    "longform": 600,
}

PHRASINGS = {
    "explain": (
        "Write a short paragraph about {}.",
        "What is meant by {}? Answer in two sentences.",
        "Give a definition of {} and one example.",
        "Explain {} to a beginner in three or four sentences.",
        "Describe {} in three sentences.",
        "How would you explain {} to a child? Keep it short.",
        "Why does {} matter? Answer in one paragraph.",
    ),
    "list": (
        "Give me three tips for {}.",
        "Write a checklist of five steps for {}.",
        "Name four common mistakes in {}.",
        "List three things that I need for {}.",
        "What are three benefits of {}? Use bullet points.",
    ),
    "story": (
        "Write a story of five sentences about {}.",
        "Write the first paragraph of a story about {}.",
        "Write a very short bedtime story about {}, with a happy ending.",
        "Suggest three titles for a story about {}.",
        "Tell me in one paragraph what happens in a tale about {}.",
    ),
    "email": (
        "Write a short email to {}.",
        "Write a friendly message of three sentences to {}.",
        "Draft a polite, formal email to {}. Keep it under 100 words.",
        "Write only the subject line of an email to {}.",
    ),
    "code": (
        "Write a Python function that {}.",
        "Write a short Python function that {}, with a docstring and an example.",
        "Show me a Python function that {} and explain it in two sentences.",
    ),
    "compare": (
        "What is the difference between {}? Answer in two sentences.",
        "Compare {} in one paragraph.",
        "Name two similarities and two differences between {}.",
        "In what way do {} differ?",
    ),
    "howto": (
        "I need help with {}. Give me a step-by-step guide with short steps.",
        "How should I begin with {}? Explain in one paragraph.",
        "Write a plan for one week of {}, with one line for each day.",
    ),
    "longform": (
        "Explain {}. Write about 250 words.",
        "Write a guide on {}, with a heading for each part.",
        "Describe in detail {}, in five numbered points.",
    ),
}

CONCEPT_TURNS = (
    "Why does it matter? Answer in two sentences.",
    "Give me one example from everyday life.",
    "List three facts about it.",
    "Write one quiz question about it, with the answer.",
    "Explain it again so that a six-year-old would understand.",
    "What do people often get wrong about it?",
    "Which other topics should I learn about next? Name three.",
    "Write a short paragraph on its history.",
    "Name two people or professions that deal with it.",
    "Suggest a simple classroom activity about it.",
    "Put all that into one sentence.",
    "Write a title for a talk about it.",
    "How could I remember this more easily?",
    "What are its advantages and disadvantages? Two of each, please.",
    "Write a short message to a friend in which you recommend the topic.",
)

ACTIVITY_TURNS = (
    "How long does that take?",
    "What do I need to buy first? Give me a short list.",
    "What is the most common mistake?",
    "I don't have much time. What can I do in ten minutes a day?",
    "How do I stay motivated?",
    "Give me a plan for the first three days.",
    "Which book or course would you recommend to a beginner? Describe what it should contain.",
    "How will I know that I am making progress?",
    "What would it cost?",
    "Can I do it together with a friend?",
    "Write me a short note to hang on the fridge.",
    "Thank you! Sum up your advice in two sentences.",
    "What should I avoid?",
    "Give me one more tip that few people know.",
    "What could I do next, when I am good at it?",
)

PLACE_TURNS = (
    "What is its capital?",
    "Which language do people speak there?",
    "Name three foods that I should try.",
    "Which three places should I visit? One sentence for each.",
    "What is the best time of the year for a visit?",
    "What should I pack?",
    "Write a plan for a weekend in the capital.",
    "Tell me one interesting fact about its history.",
    "How do people greet each other there?",
    "What kind of money do they use?",
    "Write a short postcard from there to my parents.",
    "What gifts could I bring home?",
    "How can I travel around without a car?",
    "What animals live there?",
    "Describe its landscape in three sentences.",
)

STORY_TURNS = (
    "What is the name of the main character?",
    "What happens next? Write three sentences.",
    "Write a sad ending in three sentences.",
    "Now write a happy ending in three sentences.",
    "Describe the place where the story happens.",
    "Suggest three titles for the story.",
    "What can a reader learn from it?",
    "Add a friend for the main character and describe the friend in two sentences.",
    "Write what the main character thinks in the evening.",
    "Tell the beginning again from the point of view of an animal.",
    "Write a short advertisement for the book.",
    "For which age is the story? Answer in one sentence.",
)

TEXT_TURNS = (
    "Suggest a title for the text.",
    "List the three most important facts.",
    "Who is mentioned in the text?",
    "Write one question that a reader may ask, and answer it.",
    "Rewrite the first sentence in simpler words.",
    "What problem does the text describe?",
    "What may happen next? Answer in two sentences.",
    "Write a short message to a friend about this.",
    "Name three key words.",
    "Is the tone of the text positive or negative?",
)

ARTICLE_TURNS = (
    "Summarize the first article in two sentences.",
    "What is the second article about?",
    "Suggest a title for the first article.",
    "Name three places or people from the articles.",
    "Which article mentions money? Explain in one sentence.",
    "Write two questions for a discussion of the articles.",
    "What do the articles have in common?",
    "Write a letter to the editor about one of the articles, in three sentences.",
    "Which of the problems has been solved?",
    "What would you do in the place of the people in the third article?",
    "Write a short paragraph that tells the news of the first article to a child.",
    "Thank you. Put what we discussed into two sentences.",
)

MESSAGE_TASKS = (
    "Rewrite this message so that it is polite and professional:",
    "Make this message shorter and clearer:",
    "Rewrite this message in a friendly tone:",
    "Correct and improve this message:",
    "What does the writer of this message want? Answer in one sentence.",
    "Write a short reply to this message:",
)

PASSAGE_TASKS = (
    "Summarize the following text in two sentences.",
    "Write a one-sentence summary of this text.",
    "List the main points of the following text.",
    "Summarize this text for a child.",
    "Write a headline and a short teaser for this article.",
    "What is the main idea of this text?",
)

SYSTEMS = (
    "You are a patient teacher. You answer briefly and clearly.",
    "You rewrite what the user sends you so that it is concise.",
    "You are a cheerful travel guide.",
)

MATH = (
    "{name} buys {a} {thing} for {b} dollars each. How much does {name} pay?",
    "{name} has {c} {thing} and gives away {a}. How many {thing} are left?",
    "A box holds {a} {thing}. How many {thing} are in {b} boxes? Show the steps.",
    "{name} packs {c} {thing} into bags of {a}. How many full bags are there, and how many {thing} remain?",
    "{name} collects {a} {thing} on Monday and twice as many on Tuesday. How many is that in all?",
    "A pack of {thing} costs {c} dollars and is now {b}0 percent cheaper. What is the new price?",
    "{name} walks {a} kilometers a day. How far does {name} walk in {b} days?",
    "Solve the equation: {b}x + {a} = {c}",
    "What is {c} plus {a} times {b}? Explain the order of operations.",
    "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
)
NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "pencils", "stickers", "books", "marbles", "eggs", "tickets", "cups", "candles", "stamps")


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
