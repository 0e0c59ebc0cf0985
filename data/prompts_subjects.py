"""The subjects of the demo prompts, written by hand, one a line; demo_prompts.py puts them into task phrasings."""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


CONCEPTS = lines("""
    photosynthesis
    gravity
    inflation
    the water cycle
    democracy
    friction
    compound interest
    erosion
    recycling
    the greenhouse effect
    natural selection
    magnetism
    supply and demand
    the food chain
    electricity
    the solar system
    plate tectonics
    a solar eclipse
    evaporation
    the immune system
    vaccination
    the blood circulation
    renewable energy
    machine learning
    encryption
    an operating system
    a database
    cloud computing
    an algorithm
    open-source software
    biodiversity
    deforestation
    pollination
    fermentation
    condensation
    combustion
    the periodic table
    an atom
    a chemical reaction
    acids and bases
    the speed of light
    sound waves
    refraction
    inertia
    kinetic energy
    a lever
    a pulley
    hibernation
    migration of birds
    camouflage in animals
    metamorphosis
    coral reefs
    rainforests
    deserts
    glaciers
    volcanoes
    earthquakes
    hurricanes
    the ozone layer
    air pollution
    a budget
    insurance
    taxation
    a trade union
    globalization
    urban planning
    public transport
    the printing press
    the Industrial Revolution
    the Renaissance
    the Silk Road
    the Roman Empire
    ancient Egypt
    the scientific method
    critical thinking
    empathy
    teamwork
    leadership
    time management
    mindfulness
    a balanced diet
    dietary fiber
    sleep hygiene
    first aid
    digital literacy
    copyright
    freedom of speech
    human rights
    the separation of powers
    a constitution
    impressionism
    perspective in drawing
    rhythm in music
    a metaphor
    an autobiography
    a haiku
    folklore
    philosophy
    stoicism
    a placebo
    probability
    a prime number
    the Pythagorean theorem
    statistics
    a fraction
""")

ACTIVITIES = lines("""
    learning to swim as an adult
    growing tomatoes on a balcony
    preparing for a job interview
    baking sourdough bread
    saving money on groceries
    learning a new language
    packing for a long trip
    training a puppy
    writing a cover letter
    reading more books
    running a first half marathon
    keeping a diary
    organizing a small kitchen
    cooking for one person
    taking better photos with a phone
    giving a presentation
    falling asleep faster
    studying for an exam
    working from home
    cleaning a bicycle chain
    planning a birthday party for children
    starting a vegetable garden
    making friends in a new city
    reducing plastic waste at home
    cutting down on screen time
    brewing good coffee
    sewing on a button
    hiking with small children
    buying a used car
    painting a room
    negotiating a salary
    learning to play the guitar
    caring for houseplants
    writing a short story
    running a productive meeting
    moving to a new flat
    making a weekly meal plan
    drinking more water
    choosing a laptop for school
    backing up family photos
    protecting an online account
    keeping bees
    building a bookshelf
    composting kitchen scraps
    doing yoga in the morning
    volunteering at an animal shelter
    interviewing a grandparent
    teaching a child to ride a bicycle
    camping in the rain
    traveling with a cat
    managing stress at work
    giving honest feedback
    saying no politely
    learning to touch type
    making soup from leftovers
    ironing a shirt
    sharing a flat with strangers
    getting ready for winter
    repairing a flat tire
    improving one's handwriting
""")

CHARACTERS = lines("""
    a lighthouse keeper who collects messages in bottles
    a robot that is afraid of the dark
    a girl who can talk to trees
    an old clockmaker and a broken watch
    a fox who wants to learn to read
    two brothers who build a raft
    a baker whose bread makes people tell the truth
    a cat that rides the same train every day
    a painter who has lost her favorite color
    a boy who finds a map in a library book
    a dragon who runs a laundry
    a teacher who becomes invisible for one day
    a sailor who has never seen the sea
    a scarecrow that makes friends with a crow
    an astronaut who misses the rain
    a mouse who lives in a piano
    a village where nobody can whistle
    a tailor who sews pockets full of stories
    a grandmother who enters a chess tournament
    a snowman who wants to see summer
    a mail carrier with one letter left
    a whale that sings the wrong song
    a gardener who grows a blue rose
    a night watchman in a toy museum
    a shepherd who counts stars instead of sheep
    a violin that refuses to play
    a small cloud that follows a small dog
    a detective who solves the case of the missing bell
    a turtle that wins a race by accident
    a queen who trades places with a cook
    a boy and his homemade kite
    a librarian who finds a door behind a shelf
    a bridge that moves at night
    a frog who is elected mayor
    an inventor whose machine makes only soap bubbles
    a lost glove looking for its pair
    a candle maker in the longest winter
    a pirate who gets seasick
    a beekeeper and the bees that dance
    a young musician on a rainy market square
""")

SITUATIONS = lines("""
    thank my neighbor for watering my plants
    ask my landlord to repair the heating
    tell my teacher that I will be absent on Monday
    invite my colleagues to a farewell lunch
    apologize to a customer for a late delivery
    ask a professor for a letter of recommendation
    cancel a dentist appointment
    ask my manager for a day off
    congratulate a friend on a new job
    follow up after a job interview
    ask a hotel about a late check-in
    complain politely about a noisy construction site
    welcome a new member to our chess club
    remind the team about the deadline on Friday
    decline an invitation to a wedding
    ask the library to extend a loan
    offer my old sofa to a charity
    report a broken street light to the city
    ask a supplier for a price list
    thank a host family for a wonderful week
    tell parents about the school trip to the zoo
    ask for a refund for a damaged lamp
    introduce myself to a new client
    propose a new date for a meeting
    ask a friend to lend me a tent
    announce that the office is closed on Thursday
    ask a bakery for a birthday cake
    resign from my job after five years
    apply for a summer job at a bookshop
    tell my team about a change in the schedule
    ask a doctor for a copy of my test results
    confirm a table reservation for six people
    thank a volunteer for her help at the festival
    ask the gym to end my membership
    request a quiet room at a conference hotel
    inform customers about new opening hours
    ask my brother to pick up our parents at the station
    share the minutes of a meeting
    ask a neighbor to keep the gate closed
    offer help to a colleague who is ill
""")

FUNCTIONS = lines("""
    returns the largest number in a list
    counts the vowels in a string
    reverses a string
    checks whether a number is even
    computes the factorial of a number
    checks whether a word is a palindrome
    returns the sum of the digits of a number
    converts Celsius to Fahrenheit
    removes duplicates from a list
    merges two dictionaries
    returns the first n Fibonacci numbers
    checks whether a number is prime
    counts the words in a text
    finds the longest word in a sentence
    sorts a list of tuples by the second item
    flattens a list of lists
    returns the average of a list of numbers
    counts how often each letter occurs in a word
    reads a text file and returns its lines
    writes a dictionary to a JSON file
    returns the common elements of two lists
    converts a number of minutes to hours and minutes
    checks whether two words are anagrams
    capitalizes the first letter of each word
    returns all even numbers of a list
    computes the area of a circle
    rotates a list by k positions
    generates a random password
    validates an email address
    returns the second largest number in a list
    splits a list into chunks of size n
    computes the greatest common divisor of two numbers
    converts a decimal number to binary
    counts the lines of a file
    swaps the keys and values of a dictionary
    finds the index of an item in a sorted list
    computes the median of a list
    removes all spaces from a string
    returns the number of days between two dates
    prints a multiplication table
""")

SNIPPETS = {
    "adds up the even numbers": "total = 0\nfor n in numbers:\n    if n % 2 == 0:\n        total += n\nprint(total)",
    "counts words": "counts = {}\nfor word in text.split():\n    counts[word] = counts.get(word, 0) + 1",
    "opens a file": 'with open("notes.txt") as file:\n    for line in file:\n        print(line.strip())',
    "halves a number": "steps = 0\nwhile n > 1:\n    n = n // 2\n    steps += 1",
    "squares": "squares = [x * x for x in range(10)]\nprint(squares[-1])",
    "greets": 'def greet(name="friend"):\n    return f"Hello, {name}!"\n\nprint(greet())',
    "sorts names": "names = sorted(people, key=lambda p: p.age)\nfor person in names[:3]:\n    print(person.name)",
    "catches an error": 'try:\n    value = int(text)\nexcept ValueError:\n    value = 0\n    print("Not a number")',
    "a class": "class Bag:\n    def __init__(self):\n        self.n = 0\n\n    def add(self):\n        self.n += 1",
    "joins strings": 'parts = ["red", "green", "blue"]\nprint(", ".join(parts).upper())',
}

PAIRS = lines("""
    a lake and a pond
    weather and climate
    a simile and a metaphor
    mass and weight
    a virus and a bacterium
    tea and coffee
    a novel and a short story
    a crocodile and an alligator
    speed and velocity
    a comet and an asteroid
    a debit card and a credit card
    RAM and a hard drive
    baking and frying
    a frog and a toad
    jogging and walking
    electric cars and petrol cars
    cotton and wool
    a violin and a guitar
    a lawyer and a judge
    the Moon and Mars
    butter and margarine
    trains and planes
    a moth and a butterfly
    watercolor and oil paint
    a list and a tuple in Python
    a compiler and an interpreter
    renting and buying a home
    cats and dogs as pets
    paper books and e-books
    living in a city and living in the country
    football and basketball
    an introvert and an extrovert
    a fruit and a vegetable
    fiction and nonfiction
    solar power and wind power
    a verb and a noun
    revenue and profit
    a river and a canal
    wood and plastic as materials for toys
    working in an office and working from home
    a bus and a tram
    rice and pasta
""")

PLACES = lines("""
    France
    Japan
    Italy
    Egypt
    Canada
    Brazil
    Germany
    Kenya
    India
    Spain
    Norway
    Greece
    Peru
    Australia
    Mexico
    Portugal
    China
    Turkey
    Sweden
    Argentina
    Poland
    Thailand
    Ireland
    Morocco
    Austria
    Cuba
    Finland
    Vietnam
""")

QUICK = lines("""
    Answer with one word: what color is a ripe banana?
    Answer with one word: which planet is closest to the Sun?
    Answer with one word: what is the opposite of hot?
    Answer with one word: what do bees make?
    Answer with one word: which animal barks?
    Answer with one word: what is frozen water called?
    Answer with one word: what season comes after winter?
    Answer with one word: what is the opposite of early?
    Answer with one word: which metal is attracted by a magnet?
    Answer with one word: what do you call a baby cat?
    Answer with one word: which day comes after Friday?
    Answer with one word: what is the largest ocean?
    Answer with one word: what gas do plants take in?
    Answer with one word: what is the plural of mouse?
    Answer with one word: what is the past tense of run?
    Answer with one word: which organ pumps blood?
    Answer with yes or no: is a whale a fish?
    Answer with yes or no: does the Moon make its own light?
    Answer with yes or no: is ice lighter than water?
    Answer with yes or no: can penguins fly?
    Answer with yes or no: is the number 21 prime?
    Answer with yes or no: is a tomato a fruit?
    How many days are there in a week?
    How many legs does a spider have?
    How many minutes are in two hours?
    How many continents are there?
    How many sides does a hexagon have?
    How many strings does a violin have?
    How many letters are in the English alphabet?
    What is the boiling point of water in Celsius?
    What is the largest mammal?
    What is the tallest animal on land?
    What is the chemical symbol for gold?
    What is the square root of 81?
    What is 7 times 8?
    What is 15 percent of 200?
    What is the freezing point of water in Fahrenheit?
    Who wrote Romeo and Juliet?
    Who painted the Mona Lisa?
    Who was the first person to walk on the Moon?
    Who invented the telephone?
    In what year did the Second World War end?
    Which language is spoken in Brazil?
    Which country has the largest population?
    Which river flows through London?
    Which instrument has 88 keys?
    What do you call a person who flies a plane?
    What do you call a shape with three sides?
    What is the main ingredient of bread?
    What is the fastest land animal?
    Give me a synonym for happy.
    Give me a synonym for brave.
    Give me a word that rhymes with moon.
    Give me an adjective that describes a storm.
    Translate the word bread into French.
    Translate the word water into Spanish.
    Translate "good morning" into German.
    Translate "thank you" into Italian.
    Correct the spelling: recieve
    Correct the spelling: tommorow
    Correct the grammar: She go to school every day.
    Correct the grammar: I have saw that movie.
    Correct the grammar: He don't like apples.
    Correct the grammar: We was late for the bus.
    Complete the sentence: The early bird catches
    Complete the sentence: Practice makes
    Is the sentence "I love this place" positive or negative?
    Is the sentence "The soup was cold and the waiter rude" positive or negative?
    Is the sentence "What a wonderful gift" positive or negative?
    Is the sentence "The train was late again" positive or negative?
""")

ESSAYS = lines("""
    how a city could become friendlier to people on foot
    what a school could do so that fewer pupils are bored
    how a small shop can compete with a large supermarket
    the ways in which music helps people to concentrate
    how families can waste less food
    what makes a good neighbor
    how museums could attract young visitors
    the ways in which sport brings people together
    how a company can keep its employees happy
    why handwriting is still worth learning
    how a village could prepare for a flood
    the role of public libraries today
    how tourists can respect the places they visit
    the ways in which pets change a household
    how to design a playground for all ages
    what a beginner should know about investing
    how a team can work well across time zones
    the ways in which gardens help a city
    how a restaurant can become more sustainable
    what children learn from board games
    how to plan a week of healthy meals for a family
    how a student can write a good research paper
    the benefits of learning to cook at a young age
    how to build a daily routine that lasts
    the ways in which a community can welcome newcomers
    how to prepare a house for a cold winter
    how a beginner can start with watercolor painting
    what to consider before adopting a dog
    how to organize a neighborhood street festival
    how to write a business plan for a small cafe
    the steps of developing a mobile app
    how to prepare for a three-day hike
    how to set up a home office on a budget
    how to plan a community vegetable garden
    how to run a book club that people enjoy
    how to choose a musical instrument for a child
""")

TABLES = {
    "bakery sales": ("product", ["rye bread", "white rolls", "croissants", "seed bread", "cinnamon buns", "baguettes"]),
    "visitors of the museum": ("room", ["minerals", "fossils", "birds", "maps", "old tools", "costumes", "coins"]),
    "library loans": ("section", ["novels", "children's books", "travel", "history", "cooking", "films", "music"]),
    "bicycle counts": (
        "street",
        ["Mill Road", "Station Street", "Harbor Lane", "Castle Hill", "Park Avenue", "Long Row"],
    ),
    "harvest of the garden": ("crop", ["beans", "carrots", "pumpkins", "lettuce", "tomatoes", "potatoes", "onions"]),
    "rainfall": ("station", ["Northfield", "Oak Hill", "Riverside", "South Bay", "West Moor", "Lakeview"]),
    "tickets of the swimming pool": (
        "kind",
        ["adults", "children", "families", "seniors", "season tickets", "courses"],
    ),
    "repairs of the workshop": ("device", ["toasters", "lamps", "radios", "bicycles", "kettles", "clocks", "blenders"]),
}
