"""Instructions: known answers, an answer for and against each rule, and what nobody should pay."""

import asyncio
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Reward
from envs.following import instruction_following
from envs.following.instructions import RULES
from envs.following.sentences import sentences, simple_sentences
from support.verifiers import HOSTILE, gym_rows, known_answers

MORE = {"relation": "at least"}
FEWER = {"relation": "less than"}
# For each id: arguments, a text that follows it, a text that does not.
EXAMPLES = [
    ("keywords:existence", {"keywords": ["cat", "d.g"]}, "A Cat, a dog", "a cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "cats", "a CAT!"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2} | MORE, "Cat scat", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2} | FEWER, "cat", "cat cat"),
    ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 1} | MORE, "a", "b"),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"},
     "Ee", "e"),
    ("letters:letter_counting2", {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
     "no", "#"),
    ("keywords:word_once", {"keyword": "cat"}, "a cat", "cat cat"),
    ("count:count_increment_word", {"keyword1": "a", "keyword2": "b"}, "a bb", "a b"),
    ("keywords:exclude_word_harder", {"keyword": "cat", "instruction": "x"}, "cat", "a cat is"),
    ("keywords:no_adjacent_consecutive", {}, "cat and dog", "cat dog"),
    ("keywords:palindrome", {}, "I see anna", "see cats"),
    ("keywords:keyword_specific_position", {"keyword": "cat", "n": 2, "m": 3},
     "Hello. See the cat.", "See the cat. Hello."),
    ("keywords:start_end", {}, "Cats see cats", "cats see cats."),
    ("language:response_language", {"language": "de"},
     "Das ist ein Satz, der auf Deutsch ist.", "This is a sentence in English."),
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN ENGLISH", "This is a sentence"),
    ("change_case:english_lowercase", {}, "this is a sentence in english", "DAS ist ein satz"),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "at least"}, "SEE THE cat", "See THE cat"),
    ("count:lowercase_counting", {"N": 2}, "One two three", "one two three"),
    ("length_constraints:number_words", {"num_words": 3} | MORE, "one, two. three", "one two"),
    ("length_constraints:number_sentences", {"num_sentences": 2} | MORE,
     "I see Dr. Who. He sees me.", "I see Dr. Who."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b", "a *** *** b"),
    ("paragraphs:paragraphs", {}, "***\na\n***\nb", "a"),
    ("paragraphs:paragraphs2", {}, "a\n\nb\n\n", "a\nb"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Cat"}, "a\n\n\"cat's x", "cat\n\na"),
    ("letters:letter_counting", {"N": 3} | FEWER, "ab 12", "abc"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 3},
     "I see.\n***\nYou see.\n***\nWe see.", "I see.\n***\nYou see."),
    ("count:count_unique", {}, "one two", "one two one"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a] ]["),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np. s. y", "x\nps y"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S y", "P.S. y"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a*", "* * **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2},
     "Part 1\na\nPart 2\nb", "Part 1\nPart b"),
    ("detectable_format:json_format", {}, "```json\n{\"a\": 1}\n```", "{a: 1}"),
    ("detectable_format:title", {}, "<<a>>", "<< >>"),
    ("detectable_format:sentence_hyphens", {}, "One.-Two.", "One. - Two."),
    ("detectable_format:square_brackets", {}, "[one] [two]", "[one] two"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am>> at home"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("punctuation:punctuation_dot", {}, "a b", "a. b"),
    ("punctuation:punctuation_exclamation", {}, "a b", "a! b"),
    ("startend:end_checker", {"end_phrase": "The End"}, 'x "the end"', "the end."),
    ("startend:quotation", {}, ' "a" ', '"a'),
    ("first_word:first_word_answer", {"first_word": "cat"}, "Cat sees", "cat, sees"),
    ("first_word:first_word_sent", {"first_word": ["cat"]},
     "Cat sits. Cat runs.", "Cat sits. Dog runs."),
    ("last_word:last_word_answer", {"last_word": "cat"}, "see Cat!", "cat sees"),
    ("last_word:last_word_sent", {"last_word": "cat"}, "A cat. B cat!", "A cat. B dog."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say A "}, "say a: A", "A: say a"),
    ("copy:copy", {"prompt_to_repeat": "Say A"}, " say a\n", "say a b"),
    ("copy:copying_simple", {"prompt_to_repeat": "Say A"}, "Say A", "A"),
    ("copy:copying_multiple", {"prompt_to_repeat": "A", "N": 2}, "a ****** A", "a"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "BC", "bcd"),
    ("copy:repeat_phrase", {"phrase": "I see the cat", "small_n": 2},
     "I see a cat, I saw the cat", "I see the cat, I see the cat"),
]  # fmt: skip


# Sentences as NLTK's own English model counts them.
SENTENCES = [
    ("The answer is no. Given that, go. The no. 5 bus.", 4),
    ("See fig. 3 and Sec. 4. Then stop. Sat. is a day.", 6),
    ("It is 9 a.m. in Mich. and sunny. Jan. 5 is a day.", 2),
    ("We ate pears, etc. Then we slept, e.g. here.", 3),
    ("Take Q. Then go. Take Q. Smith with you.", 3),
    ("We met in the U.S. He left. In the U.S. His cat stayed.", 3),
    ("Mr. J. K. Smith sat. Ann E. Smith wrote it.", 2),
    ("Warner Bros. Studios, St. Paul vs. Bern. The end.", 2),
    ('Wait... What?! "No." (Yes!) [So.] There.', 6),
    ("1. One\n2. Two\n* It is. \n* It was.", 4),
]


@pytest.mark.parametrize(("text", "count"), SENTENCES)
def test_sentences(text, count):
    assert len(sentences(text)) == count


def test_sentences_of_the_other_rules():
    found = ['He, Dr. A. Cat, said "What"?', "!", 'Then "No"!', ".", "See x.org for 3.5..."]
    text = 'He, Dr. A. Cat, said "What?!" Then "No!." See x.org for 3.5...'
    assert simple_sentences(text) == found


def row(name: str, given: dict | None, **more) -> dict:
    return {"instruction_id_list": [name], "kwargs": [given]} | more


def judged(text: str, of: dict) -> Reward:
    return asyncio.run(instruction_following.verify(of, text))


def test_there_is_an_example_of_each_rule():
    assert {name for name, *_ in EXAMPLES} == set(RULES) and len(RULES) == 54
    assert all(function.__doc__ for function in RULES.values())


@pytest.mark.parametrize(("name", "given", "good", "bad"), EXAMPLES)
def test_rules(name, given, good, bad):
    instruction_following.check(row(name, given))
    assert RULES[name](good, **given) is True or RULES[name](good, **given) == 1
    assert not RULES[name](bad, **given)


def test_known_answers():
    """All agree but one text of 31 sentences, by NLTK's own model too, in which 30 were counted."""
    check = instruction_following.make_check()
    wrong = []
    for of, response, reward, case in known_answers("ifeval", "instruction_following"):
        instruction_following.check(of)
        pairs = zip(of["instruction_id_list"], of["kwargs"], strict=True)
        asked = [(name, instruction_following.present(given)) for name, given in pairs]
        followed = check(asked, str(response))["followed"]
        assert float(all(case["expected_list"])) == reward
        wrong += [
            (name, case["needs_nltk"])
            for (name, _), ours, theirs in zip(asked, followed, case["expected_list"], strict=True)
            if ours != theirs
        ]
    assert wrong == [("length_constraints:number_sentences", True)]


@pytest.mark.slow
def test_known_rewards():
    for of, response, reward, case in known_answers("instruction_following_gym", "x"):
        instruction_following.check(of)
        assert judged(response, of).value == reward, case
    for of in gym_rows("instruction_following", "instruction_following_simple_agent"):
        instruction_following.check(of)
        assert judged("", of).value == 0


def test_modes_and_answers_without_text():
    names = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"]}
    of = names | {"kwargs": [{}, None]}
    assert judged('"a"', of) == Reward(1.0, {"share": 1.0, "broken": []})
    half = {"share": 0.5, "broken": ["startend:quotation"]}
    assert judged("a", of) == Reward(0.0, half)
    assert judged("a", of | {"grading_mode": "fraction"}) == Reward(0.5, half)
    nested = {"verifier_metadata": of | {"grading_mode": "fraction"}}
    assert judged("a", nested).value == 0.5
    assert judged("a", {"verifier_metadata": of, "grading_mode": "fraction"}).value == 0.5
    for empty in ("", " \n", "<think>no comma</think>", "<think>no comma"):
        assert judged(empty, of | {"grading_mode": "fraction"}).value == 0
    broken = row("keywords:existence", {"keywords": ["("]})
    assert judged("(", broken).value == 0


def test_wrong_answers_earn_nothing():
    """A thousand changes of texts that follow a rule, of a kind that must break it."""
    rng = random.Random(0)
    changes = {
        "punctuation:no_comma": lambda t: t + ",",
        "startend:quotation": lambda t: t.strip() + "x",
        "detectable_format:json_format": lambda t: t + "}",
        "length_constraints:number_paragraphs": lambda t: t + "\n***\nmore",
        "detectable_format:number_bullet_lists": lambda t: t + "\n* more",
        "copy:copy": lambda t: t + rng.choice(" abc") + "x",
        "count:count_unique": lambda t: t + " " + t,
        "keywords:word_once": lambda t: t + " cat",
        "combination:two_responses": lambda t: t + "\n******\nc",
        "startend:end_checker": lambda t: t + " x",
        "detectable_format:square_brackets": lambda t: t + " x",
        "first_word:first_word_answer": lambda t: "x " + t,
        "new:copy_span_idx": lambda t: t + "D",
        "copy:copying_multiple": lambda t: t + "******a",
    }
    examples = [example for example in EXAMPLES if example[0] in changes]
    for name, arguments, good, _ in (rng.choice(examples) for _ in range(1000)):
        spoiled = changes[name](good)
        assert not RULES[name](spoiled, **arguments), (name, spoiled)


@pytest.mark.slow
def test_hostile_answers():
    """Each rule has an end on each of them, and one that takes too long costs the answer."""
    of = {
        "instruction_id_list": [name for name, *_ in EXAMPLES],
        "kwargs": [given for _, given, *_ in EXAMPLES],
        "grading_mode": "fraction",
    }

    async def judge() -> list[Reward]:
        return await asyncio.gather(*(instruction_following.verify(of, t) for t in HOSTILE))

    began = time.monotonic()
    assert all(0 <= reward.value < 1 for reward in asyncio.run(judge()))
    assert time.monotonic() - began < 120


@given(st.text(st.sampled_from("aB1. *-#<>[]\"',!?\n")) | st.text())
@settings(max_examples=200, deadline=None)  # of 56 instructions each
def test_any_text_is_judged(text):
    asked = [(name, given) for name, given, *_ in EXAMPLES]
    if text.strip():
        assert len(CHECK(asked, text)["followed"]) == len(asked)


CHECK = instruction_following.make_check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instruction_id_list": "a"}, "instruction_id_list is 'a', expected a list of ids"),
        ({"instruction_id_list": []}, "kwargs is .*expected one object for each of the 0"),
        ({"instruction_id_list": ["a:b"]}, r"instruction_id_list\[0\] is 'a:b', expected one of"),
        ({"kwargs": [5]}, r"kwargs\[0\] is 5, expected an object or null"),
        ({"kwargs": [{}]}, r"kwargs\[0\].num_words is missing or null, expected a number"),
        ({"kwargs": [{"num_words": "9"} | MORE]}, r"kwargs\[0\].num_words is '9', expected a num"),
        ({"kwargs": [{"num_words": 9, "relation": "most"}]}, r"relation is 'most', expected 'less"),
        ({"kwargs": [{"num_words": 9, "x": 1} | MORE]}, r"kwargs\[0\].x is 1, expected no such"),
        ({"grading_mode": "some"}, "grading_mode is 'some', expected binary or fraction"),
    ],
)
def test_bad_rows(fields, message):
    good = row("length_constraints:number_words", {"num_words": 9.0} | MORE)
    instruction_following.check(good)
    for of in (good | fields, {"verifier_metadata": good | fields}):
        with pytest.raises(ValueError, match=message):
            instruction_following.check(of)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("copy:copy", {"prompt_to_repeat": " "}, "prompt_to_repeat is ' ', expected text"),
        ("keywords:existence", {"keywords": []}, r"keywords is \[\], expected a list of texts"),
        ("keywords:existence", {"keywords": ["a", 5]}, r"keywords is \['a', 5\], expected a list"),
        ("count:lowercase_counting", {"N": -1}, "N is -1, expected a number from 0"),
        ("count:lowercase_counting", {"N": float("nan")}, "N is nan, expected a number from 0"),
        ("count:lowercase_counting", {"N": True}, "N is True, expected a number from 0"),
        ("keywords:keyword_specific_position", {"keyword": "a", "n": 0, "m": 1},
         r"kwargs\[0\].n is 0, expected a whole number from 1"),
        ("new:copy_span_idx", {"prompt_to_repeat": "a", "n_start": 0.5, "n_end": 1},
         "n_start is 0.5, expected a whole number from 0"),
        ("last_word:last_word_sent", {"last_word": {}}, "last_word is {}, expected a word"),
    ],
)  # fmt: skip
def test_bad_arguments(name, given, message):
    with pytest.raises(ValueError, match=message):
        instruction_following.check(row(name, given))
