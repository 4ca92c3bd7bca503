"""What the target is asked: a seeded mix of tasks and topics that we write, so that no data set is needed.

The lists cover the kinds of work that chat models get: writing, roles, reasoning, mathematics, code, extraction,
science, humanities, small talk. Nothing of any benchmark's prompts is in them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

TASKS = (
    "Explain {topic} to a ten-year-old.",
    "Write a short essay about {topic}.",
    "What are the main advantages and disadvantages of {topic}?",
    "Give me five practical tips about {topic}.",
    "Write a blog post introduction on {topic}.",
    "Compose a poem about {topic}.",
    "Summarize the history of {topic} in two paragraphs.",
    "What are common misconceptions about {topic}?",
    "Write a dialogue between a teacher and a student about {topic}.",
    "Draft a polite email to a colleague about {topic}.",
    "Create a one-week plan for learning about {topic}.",
    "How does {topic} affect everyday life?",
    "Compare {topic} with {other}.",
    "List the key facts one should know about {topic}.",
    "Write a short story in which {topic} plays a central role.",
    "Pretend you are an expert on {topic}. Introduce yourself and answer a beginner's first question.",
    "What questions should I ask before making a decision about {topic}?",
    "Write a product description related to {topic}.",
    "Describe {topic} step by step.",
    "Give a balanced argument for and against {topic}.",
    "What is the relationship between {topic} and {other}?",
    "Write three quiz questions about {topic} with answers.",
    "Why is {topic} important?",
    "Suggest ten titles for an article about {topic}.",
    "How would you explain the difference between {topic} and {other} to a friend?",
    "Write a speech about {topic} for a school assembly.",
    "What might {topic} look like in fifty years?",
    "Give an outline for a presentation on {topic}, with headings and bullet points.",
    "Imagine you are a journalist. Write a news report about {topic}.",
    "Describe a day in the life of someone who works with {topic}.",
    "What are the ethical questions around {topic}?",
    "Tell me something surprising about {topic}.",
    "Write a review of a book about {topic}.",
    "I know nothing about {topic}. Where should I start?",
    "Write a persuasive paragraph that convinces people to care about {topic}.",
    "Extract the most important terms related to {topic} and define each in one sentence.",
)
TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "plate tectonics", "vaccines", "DNA", "electric cars",
    "solar energy", "nuclear power", "climate change", "recycling", "the Roman Empire", "the French Revolution",
    "the Renaissance", "ancient Egypt", "the Silk Road", "the printing press", "the industrial revolution",
    "the space race", "democracy", "human rights", "inflation", "supply and demand", "the stock market",
    "personal budgeting", "starting a small business", "remote work", "job interviews", "public speaking",
    "time management", "procrastination", "meditation", "sleep", "a balanced diet", "running", "yoga", "swimming",
    "gardening", "baking bread", "coffee", "tea", "Italian cooking", "vegetarian food", "street food", "chess",
    "video games", "board games", "football", "basketball", "the Olympic Games", "jazz music", "classical music",
    "learning the guitar", "photography", "watercolor painting", "modern art", "architecture", "film making",
    "science fiction", "poetry", "Shakespeare", "mythology", "fairy tales", "philosophy", "stoicism", "ethics",
    "psychology", "memory", "learning a new language", "teaching children to read", "online education",
    "artificial intelligence", "machine learning", "neural networks", "robots", "the internet", "computer security",
    "passwords", "social media", "smartphones", "open source software", "databases", "programming in Python",
    "web design", "cloud computing", "quantum computers", "cryptography", "blockchain", "3D printing", "drones",
    "public transport", "bicycles", "air travel", "hiking", "camping", "the Amazon rainforest", "coral reefs",
    "whales", "bees", "dogs", "cats", "birds", "dinosaurs", "volcanoes", "earthquakes", "the Moon", "Mars",
    "the ocean", "deserts", "mountains", "Japan", "Brazil", "Kenya", "India", "Norway", "New York City", "Paris",
    "weddings", "friendship", "parenting", "moving to a new city", "buying a house", "saving water", "fashion",
    "antibiotics", "the human heart", "the immune system", "gravity", "magnetism", "light", "sound", "chemistry",
    "probability", "statistics", "geometry", "prime numbers", "calculus",
)  # fmt: skip
CODE_TASKS = (
    "Write a Python function that {work}.",
    "Write a JavaScript function that {work} and explain how it works.",
    "How do I write a program in Java that {work}?",
    "Write a C++ program that {work}.",
    "Give me pseudocode for an algorithm that {work}.",
    "Write a Python script that {work}, with comments and an example.",
)
CODE_WORK = (
    "reverses a string", "checks whether a word is a palindrome", "finds the largest number in a list",
    "sorts a list of numbers", "counts the words in a text file", "computes the factorial of a number",
    "prints the Fibonacci sequence", "checks whether a number is prime", "removes duplicates from a list",
    "merges two sorted lists", "finds the shortest path in a graph", "reads a CSV file and prints its rows",
    "converts Celsius to Fahrenheit", "counts the vowels in a sentence", "implements a stack", "implements a queue",
    "searches a sorted array by bisection", "computes the average of a list", "generates a random password",
    "finds common elements of two lists", "flattens a nested list", "counts how often each letter appears",
    "validates an email address", "computes the greatest common divisor", "rotates a matrix", "parses a date",
    "downloads a web page", "finds the second largest value in an array", "checks for balanced parentheses",
    "computes the power set of a set", "simulates rolling two dice", "inserts a node into a binary search tree",
)  # fmt: skip
MATH_TASKS = (
    "A shop sells {a} pens for {b} dollars. How much do {c} pens cost?",
    "What is {a} times {b} plus {c}? Show your work.",
    "If a train travels {a} kilometers in {b} hours, how far does it go in {c} hours?",
    "Solve for x: {a}x + {b} = {c}.",
    "A rectangle has sides {a} and {b}. What are its area and its perimeter?",
    "What is the probability of drawing a red ball from a bag with {a} red and {b} blue balls?",
    "Maria has {a} apples, gives away {b} and buys {c} more. How many does she have?",
    "Find the mean of {a}, {b} and {c}.",
    "A price of {c} dollars is reduced by {a} percent. What is the new price?",
    "If all {topic} enthusiasts like puzzles and Tom likes {topic}, does Tom like puzzles? Explain.",
    "{a} workers finish a job in {b} days. How long do {c} workers need?",
    "Convert {c} minutes into hours and minutes.",
)
FOLLOW_UPS = (
    "Rewrite your previous answer in simpler words.",
    "Can you make that shorter?",
    "Give me an example.",
    "Summarize your answer in three bullet points.",
    "Rewrite it in the style of a friendly letter.",
    "What is the most important point, and why?",
    "Can you explain the last part in more detail?",
    "What would someone who disagrees say?",
    "Turn your answer into a list of questions.",
    "Continue.",
    "Are you sure? Check your answer again.",
    "Now write it as a short dialogue.",
)


def instructions(seed: int) -> Iterator[str]:
    """Instructions without end, no two alike, the same for the same seed."""
    random_source = random.Random(seed)  # noqa: S311  (a mix of exercises, not a secret)
    seen: set[str] = set()
    while True:
        text = _one(random_source)
        if text not in seen:
            seen.add(text)
            yield text


def _one(source: random.Random) -> str:
    kind = source.random()
    if kind < 0.12:
        return source.choice(CODE_TASKS).format(work=source.choice(CODE_WORK))
    topic, other = source.sample(TOPICS, 2)
    if kind < 0.25:
        a, b, c = source.randint(2, 40), source.randint(2, 60), source.randint(5, 300)
        return source.choice(MATH_TASKS).format(a=a, b=b, c=c, topic=topic)
    return source.choice(TASKS).format(topic=topic, other=other)
