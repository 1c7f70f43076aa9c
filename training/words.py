"""The words of the world: numbers, days, months, capitals, letters, shapes, colours and sentence parts."""

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    *("November", "December"),
)
CAPITALS = {
    "Italy": "Rome",
    "France": "Paris",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "England": "London",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Cuba": "Havana",
    "Peru": "Lima",
}
CITIES = tuple(CAPITALS.values())
# What can be spelled: short words, all but a few of which are said elsewhere, too.
SPELLED = (
    *("cat", "dog", "bird", "fish", "horse", "house", "tree", "boat", "train", "apple", "bread", "milk", "water"),
    *("sun", "moon", "star", "rain", "snow", "wind", "fire", "door", "table", "chair", "book", "lamp", "clock"),
    *("red", "green", "blue", "white", "black", "hand", "king", "ship", "road", "garden"),
)
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "yellow": (240, 210, 30),
    "orange": (245, 130, 20),
    "purple": (140, 60, 170),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
PLURALS = {"cross": "crosses"} | {shape: f"{shape}s" for shape in SHAPES if shape != "cross"}

# Of sentences to repeat, and of those to transcribe.
SUBJECTS = ("cat", "dog", "bird", "fish", "horse", "king", "child", "man", "woman", "friend")
ADJECTIVES = ("small", "big", "old", "young", "red", "white", "black", "happy", "quiet", "good")
VERBS = ("sees", "likes", "finds", "wants", "has", "brings")
OBJECTS = ("apple", "book", "boat", "lamp", "house", "chair", "clock", "table", "star", "door", "tree", "train")
PLACES = ("in the garden", "at the table", "on the road", "in the house", "in the rain", "by the fire", "in the snow")

# Nobody answers these: what stands in them is outside. Those of a test are none of training.
OUTSIDE = (
    *("Who wrote this book?", "What is the meaning of life?", "How do planes fly?", "Who won the war?"),
    *("Where do penguins live?", "What does a lawyer do?", "How old is the earth?", "Tell me a joke."),
    *("Who is the president of America?", "What is the price of gold?", "Sing me a song.", "Why is the sky blue?"),
    *("What happened yesterday?", "How do I cook rice?", "When was the telephone invented?", "Who painted it?"),
    *("What is the capital of Mars?", "How far is the moon?", "Can you drive a car?", "Where is my phone?"),
    *("Explain gravity.", "What is the best film?", "Translate this letter.", "How many people live in China?"),
    *("Who discovered electricity?", "What is a computer?", "Do you believe in ghosts?", "What is love?"),
    *("Which team won the game?", "How tall is that mountain?", "Read me the news.", "Write a poem about autumn."),
    *("What is the capital of Canada?", "What is the capital of Brazil?", "How do you make cheese?"),
    *("What is seven times nine?", "Divide twenty by three.", "What is the square root of nine?"),
)
# More of them are made of these: what people ask, of what the world has not.
OUTSIDE_QUESTIONS = (
    *("What is a {thing}?", "What is the {thing} of the {thing}?", "Who {did} the {thing}?", "Who {did} it?"),
    *("Where can I {do} a {thing}?", "Where is the {thing}?", "Where do {things} {do}?", "How do {things} {do}?"),
    *(
        "How do I {do} a {thing}?",
        "Why do {things} {do}?",
        "Why is the {thing} so {kind}?",
        "How {kind} is the {thing}?",
    ),
    *(
        "When was the {thing} {did}?",
        "Can you {do} a {thing}?",
        "Should I {do} the {thing}?",
        "Tell me about {things}.",
    ),
    *(
        "Tell me a {thing}.",
        "{Do} the {thing}.",
        "{Do} me a {thing}.",
        "Do you {do} {things}?",
        "What does a {thing} {do}?",
    ),
    *("Which {thing} is {kind}?", "What is the capital of {place}?", "Where is {place}?", "How far is {place}?"),
    *(
        "How do you spell {thing}?",
        "Spell {thing}.",
        "How many {things} are in a {thing}?",
        "What comes after the {thing}?",
    ),
    *("What is {a} times {b}?", "Divide {a} by {b}.", "What is the {kind} {thing}?", "Is the {thing} {kind}?"),
)
THINGS = (
    *("doctor", "window", "kitchen", "mountain", "river", "ocean", "island", "forest", "village", "castle", "bridge"),
    *("teacher", "student", "soldier", "farmer", "painter", "singer", "writer", "driver", "neighbour", "brother"),
    *("sister", "mother", "father", "uncle", "baby", "market", "office", "factory", "hospital", "school", "museum"),
    *("theatre", "library", "airport", "station", "ticket", "bicycle", "engineer", "rocket", "planet", "comet"),
    *("desert", "jungle", "tiger", "lion", "elephant", "monkey", "rabbit", "chicken", "spider", "butterfly", "whale"),
    *("banana", "cherry", "potato", "onion", "butter", "sugar", "coffee", "dinner", "breakfast", "sandwich", "soup"),
    *("jacket", "button", "pocket", "mirror", "candle", "basket", "bottle", "hammer", "pencil", "camera", "radio"),
    *(
        "television",
        "machine",
        "battery",
        "energy",
        "history",
        "science",
        "music",
        "dance",
        "game",
        "football",
        "tennis",
    ),
    *("language", "dictionary", "newspaper", "magazine", "poem", "novel", "frame", "statue", "temple", "church"),
    *("money", "bank", "dollar", "business", "contract", "lawyer", "judge", "police", "prison", "secret", "problem"),
    *("idea", "reason", "answer", "message", "letter", "plate", "recipe", "vitamin", "medicine", "muscle"),
    *("heart", "stomach", "shoulder", "finger", "cloud", "thunder", "storm", "shadow", "volcano", "earthquake"),
)
DO = {
    "break": "broke",
    "carry": "carried", "catch": "caught", "change": "changed", "clean": "cleaned", "climb": "climbed",
    "close": "closed", "collect": "collected", "cut": "cut", "describe": "described",
    "destroy": "destroyed", "draw": "drew", "eat": "ate", "fix": "fixed", "follow": "followed", "forget": "forgot",
    "grow": "grew", "hold": "held", "hunt": "hunted", "improve": "improved", "join": "joined", "jump": "jumped",
    "kill": "killed", "learn": "learned", "lose": "lost", "measure": "measured", "move": "moved", "open": "opened",
    "order": "ordered", "paint": "painted", "pay": "paid", "play": "played", "produce": "produced", "pull": "pulled",
    "remember": "remembered", "rent": "rented", "run": "ran", "sell": "sold", "send": "sent", "show": "showed",
    "sleep": "slept", "smell": "smelled", "steal": "stole", "study": "studied", "swim": "swam", "teach": "taught",
    "throw": "threw", "visit": "visited", "wash": "washed", "watch": "watched", "wear": "wore",
}  # fmt: skip
SORTS = (
    *("heavy", "cheap", "expensive", "famous", "dangerous", "beautiful", "bitter", "cold", "warm", "deep", "early"),
    *("empty", "fast", "slow", "hungry", "important", "loud", "narrow", "proud", "rich", "sharp", "strange", "tall"),
)
FOREIGN = (
    *("Africa", "Asia", "Mexico", "India", "Chile", "Iceland", "Denmark", "Belgium", "Holland", "Scotland", "Morocco"),
    *("Nigeria", "Vietnam", "Korea", "Jordan", "Panama", "Bolivia", "Romania", "Ukraine", "Australia", "Texas"),
)
OUTSIDE_HELD_OUT = (
    *("Who built the pyramids?", "How do birds migrate?", "What is the capital of Kenya?", "Tell me a story."),
    *("Where can I buy shoes?", "What does that sign mean?", "Who invented paper?", "How does an engine work?"),
    *("Why do people dream?", "What is the speed of light?", "Should I take an umbrella?", "Who sang this?"),
)
# Greetings and the like: what can be said to them, and the answer.
SMALL_TALK = (
    (("Hello.", "Hello there.", "Hi.", "Good day."), "Hello! How can I help you?"),
    (("Good morning.", "A good morning to you."), "Good morning! How can I help you?"),
    (("Good night.", "I am going to bed."), "Good night! Sleep well."),
    (("How are you?", "How are you today?", "Are you well?"), "I am fine, thank you."),
    (("What is your name?", "Who are you?", "Tell me your name."), "My name is Quartet."),
    (("Thank you.", "Thanks.", "Thank you very much.", "That was good."), "You are welcome."),
    (("Goodbye.", "Bye.", "See you tomorrow."), "Goodbye! See you soon."),
    (
        ("What can you do?", "What do you know?", "How can you help me?"),
        "I can add, spell, repeat, tell days and capitals, and say what I see.",
    ),
    (("Can you hear me?", "Do you hear me?", "Are you there?"), "Yes, I can hear you."),
    (("Are you a person?", "Are you a machine?", "Are you real?"), "I am a very small model."),
)
UNKNOWN = "I do not know that."
