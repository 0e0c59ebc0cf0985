"""How the demo's prompts are put: task phrasings by kind, follow-up questions, and how long each kind's answers may be."""

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
