"""Checks the 54 instructions of verifiable-instructions, with one rule for each id.

A rule's docstring states what a text must do to follow it. The rules come from IFEval
(google-research/instruction_following_eval) and IFEvalG (allenai/open-instruct), which NeMo-Gym's
resources_servers/instruction_following uses. A rule's other arguments are the instruction's
`kwargs`; their types are checked when rows are read. As in the sources, keywords are regular
expressions.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Literal, NewType

from envs.following.sentences import sentences, simple_sentences, tokens

Relation = Literal["less than", "at least"]
Word = str | list  # the first item of a list counts
Place = NewType("Place", int)  # counted from 1
RULES: dict[str, Callable[..., bool]] = {}
CLOSED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def rule(*names: str) -> Callable:
    """Registers a function under the ids of the instructions that it checks."""

    def register(function: Callable[..., bool]) -> Callable[..., bool]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def compare(count: int, relation: Relation, limit: float) -> bool:
    """Returns whether a count is less than a limit, or at least the limit."""
    return count < limit if relation == "less than" else count >= limit


def occurrences(pattern: str, text: str) -> int:
    """Returns how often a pattern matches, regardless of case."""
    return len(re.findall(pattern.strip(), text, re.IGNORECASE))


def parts(pattern: str, text: str) -> int:
    """Returns the number of pieces between separators; -1 if an inner piece is empty.

    An empty first or last piece does not count.
    """
    found = re.split(pattern, text)
    inner = found[1:-1] if len(found) > 1 else []
    if any(not piece.strip() for piece in inner):
        return -1
    return sum(bool(piece.strip()) for piece in found)


def same(text: str, other: str) -> bool:
    """Returns whether two texts are equal, apart from case and white space around them."""
    return text.strip().lower() == other.strip().lower()


def first(word: Word) -> str:
    """Returns the word, or the first of a list, stripped."""
    if isinstance(word, str):
        return word.strip()
    return str(word[0]).strip()


# --- Keywords ---


@rule("keywords:existence")
def has_keywords(text: str, keywords: list) -> bool:
    """Each keyword appears."""
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in keywords)


@rule("keywords:forbidden_words")
def lacks_words(text: str, forbidden_words: list) -> bool:
    """No word appears as a whole word."""
    patterns = (rf"\b{word}\b" for word in forbidden_words)
    return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


@rule("keywords:frequency", "keywords:word_count_different_numbers")
def keyword_frequency(text: str, keyword: str, frequency: float, relation: Relation) -> bool:
    """The keyword appears fewer than, or at least, N times."""
    return compare(occurrences(keyword, text), relation, frequency)


@rule("keywords:letter_frequency", "letters:letter_counting2")
def letter_frequency(text: str, letter: str, let_frequency: float, let_relation: Relation) -> bool:
    """The letter, in either case, appears fewer than, or at least, N times."""
    return compare(Counter(text.lower())[letter.strip().lower()], let_relation, let_frequency)


@rule("keywords:word_once")
def keyword_once(text: str, keyword: str) -> bool:
    """The keyword appears once."""
    return occurrences(keyword, text) == 1


@rule("count:count_increment_word")
def once_and_twice(text: str, keyword1: str, keyword2: str) -> bool:
    """The first keyword appears once, the second twice."""
    return occurrences(keyword1, text) == 1 and occurrences(keyword2, text) == 2


@rule("keywords:exclude_word_harder")
def lacks_word_between_blanks(text: str, keyword: str, instruction: str = "") -> bool:
    """The word does not appear between two spaces."""
    return f" {keyword.strip()} " not in text


@rule("keywords:no_adjacent_consecutive")
def no_consecutive_letters(text: str) -> bool:
    """No two consecutive words begin with letters that follow each other in the alphabet."""
    letters = [word[0].lower() for word in text.split()]
    if len(letters) > 1 and any(len(letter) != 1 for letter in letters):
        return False
    return all(ord(b) - ord(a) != 1 for a, b in zip(letters, letters[1:], strict=False))


@rule("keywords:palindrome")
def has_palindrome(text: str) -> bool:
    """A word reads the same backwards; one letter suffices."""
    return any(word == word[::-1] for word in text.split())


@rule("keywords:keyword_specific_position")
def keyword_at(text: str, keyword: Word, n: Place, m: Place) -> bool:
    """The m-th word of the n-th sentence is the keyword."""
    found = simple_sentences(text)
    words = tokens(found[n - 1]) if n <= len(found) else []
    return m <= len(words) and words[m - 1] == first(keyword)


@rule("keywords:start_end")
def starts_as_it_ends(text: str) -> bool:
    """The text has two or more words, and the first is also the last."""
    words = tokens(text)
    return len(words) > 1 and words[0].lower() == words[-1].lower()


# --- Language and case ---


def detected(text: str) -> str:
    """Returns the language that langdetect finds with a fixed seed; "" if it finds none."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 1
    try:
        return str(detect(text))
    except LangDetectException:
        return ""


@rule("language:response_language")
def in_language(text: str, language: str) -> bool:
    """The text is in the language; a text without letters is in any language."""
    return detected(text) in (language, "")


@rule("change_case:english_capital")
def english_capitals(text: str) -> bool:
    """The text is in English and in capital letters."""
    return text.isupper() and detected(text) in ("en", "")


@rule("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    """The text is in English and has no capital letters."""
    return text.islower() and detected(text) in ("en", "")


@rule("change_case:capital_word_frequency")
def capital_words(text: str, capital_frequency: float, capital_relation: Relation) -> bool:
    """Fewer than, or at least, N words consist of capital letters."""
    return compare(sum(map(str.isupper, tokens(text))), capital_relation, capital_frequency)


@rule("count:lowercase_counting")
def few_lowercase_words(text: str, N: float) -> bool:
    """At most N words consist of lower-case letters."""
    return len(re.findall(r"\b[a-z]+\b", text)) <= N


# --- Length ---


@rule("length_constraints:number_words")
def number_of_words(text: str, num_words: float, relation: Relation) -> bool:
    """The text has fewer than, or at least, N words."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


@rule("length_constraints:number_sentences")
def number_of_sentences(text: str, num_sentences: float, relation: Relation) -> bool:
    """The text has fewer than, or at least, N sentences."""
    return compare(len(sentences(text)), relation, num_sentences)


@rule("length_constraints:number_paragraphs")
def number_of_paragraphs(text: str, num_paragraphs: float) -> bool:
    """The text has N paragraphs, divided by ***."""
    return parts(r"\s?\*\*\*\s?", text) == num_paragraphs


@rule("paragraphs:paragraphs")
def two_divided_paragraphs(text: str) -> bool:
    """The text has two paragraphs, divided by ***."""
    return parts(r"\s?\*\*\*\s?", text) == 2


@rule("paragraphs:paragraphs2")
def two_paragraphs(text: str) -> bool:
    """The text has two paragraphs, divided by a blank line."""
    return parts("\n\n", text) == 2


@rule("length_constraints:nth_paragraph_first_word")
def paragraph_begins_with(
    text: str, num_paragraphs: float, nth_paragraph: Place, first_word: str
) -> bool:
    """The text has N paragraphs, divided by blank lines, and the n-th begins with the word."""
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if nth_paragraph > count or not (words := paragraphs[nth_paragraph - 1].split()):
        return False
    word = re.split(r"""[.,?!'"]""", words[0].lstrip("'").lstrip('"'))[0]
    return count == num_paragraphs and word.lower() == first_word.lower()


@rule("letters:letter_counting")
def number_of_letters(text: str, N: float, relation: Relation) -> bool:
    """The text has fewer than, or at least, N Latin letters."""
    return compare(len(re.findall("[a-zA-Z]", text)), relation, N)


@rule("count:counting_composition")
def composition(text: str, n_sent: float, n_words: float) -> bool:
    """The text has three paragraphs, divided by ***, each with n sentences of m words and marks."""
    paragraphs = re.split(r"\s?\*\*\*\s?", text)
    for found in map(simple_sentences, paragraphs):
        if len(found) != n_sent or any(len(tokens(sentence)) != n_words for sentence in found):
            return False
    return len(paragraphs) == 3


@rule("count:count_unique")
def unique_words(text: str) -> bool:
    """No word or punctuation mark appears twice."""
    words = tokens(text)
    return len(words) == len(set(words))


# --- Content and format ---


@rule("detectable_content:number_placeholders")
def placeholders(text: str, num_placeholders: float) -> bool:
    """The text has at least N [placeholders]."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


@rule("detectable_content:postscript")
def postscript(text: str, postscript_marker: str) -> bool:
    """The text contains the marker; P.S. and P.P.S may have spaces in them."""
    marker = postscript_marker.strip()
    usual = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(usual.get(marker, marker.lower()), text.lower()))


@rule("detectable_format:number_bullet_lists")
def bullets(text: str, num_bullets: float) -> bool:
    """Exactly N lines begin with * or -."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^[^\S\n]*-", text, re.MULTILINE)) == num_bullets


@rule("detectable_format:constrained_response")
def closed_answer(text: str) -> bool:
    """One of three sentences appears."""
    return any(sentence in text for sentence in CLOSED)


@rule("detectable_format:number_highlighted_sections")
def highlights(text: str, num_highlights: float) -> bool:
    """The text has at least N *highlights* and **highlights** that are not empty."""
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(piece.strip("*").strip()) for piece in found) >= num_highlights


@rule("detectable_format:multiple_sections")
def sections(text: str, section_spliter: str, num_sections: float) -> bool:
    """The text has at least N headings that consist of the word and a number."""
    return len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) >= num_sections


@rule("detectable_format:json_format")
def is_json(text: str) -> bool:
    """The text is JSON, with or without a code fence."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@rule("detectable_format:title")
def title(text: str) -> bool:
    """The text has a <<title>> that is not empty."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


@rule("detectable_format:sentence_hyphens")
def hyphens(text: str) -> bool:
    """Sentences are connected by hyphens, without spaces."""
    pieces = text.split("-")
    pairs = zip(pieces, simple_sentences(text.replace("-", " ")), strict=False)
    return all(piece == piece.strip() == sentence for piece, sentence in pairs)


@rule("detectable_format:square_brackets")
def bracketed_words(text: str) -> bool:
    """Each word is in square brackets."""
    return all(word.startswith("[") and word.endswith("]") for word in text.split())


@rule("detectable_format:bigram_wrapping")
def wrapped_pairs(text: str) -> bool:
    """Each pair of words is in <<double brackets>>."""
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return all(a.startswith("<<") and b.endswith(">>") for a, b in pairs)


@rule("combination:two_responses")
def two_responses(text: str) -> bool:
    """The text has two different answers, separated by six asterisks."""
    pieces = text.split("******")
    answers = [piece.strip() for piece in pieces if piece.strip()]
    return parts(r"\*{6}", text) == 2 == len(answers) and answers[0] != answers[1]


@rule("punctuation:no_comma")
def no_comma(text: str) -> bool:
    """The text has no comma."""
    return "," not in text


@rule("punctuation:punctuation_dot")
def no_dot(text: str) -> bool:
    """The text has no dot."""
    return "." not in text


@rule("punctuation:punctuation_exclamation")
def no_exclamation(text: str) -> bool:
    """The text has no exclamation mark."""
    return "!" not in text


# --- First and last words ---


@rule("startend:end_checker")
def ends_with(text: str, end_phrase: str) -> bool:
    """The last words are the phrase, with or without quotes."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@rule("startend:quotation")
def quoted(text: str) -> bool:
    """The whole text is in double quotes."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@rule("first_word:first_word_answer")
def begins_with_word(text: str, first_word: Word) -> bool:
    """The text begins with the word."""
    return same(text.split()[0], first(first_word))


@rule("first_word:first_word_sent")
def sentences_begin_with(text: str, first_word: Word) -> bool:
    """Each sentence begins with the word."""
    found = simple_sentences(text)
    return all(s.split() and same(s.split()[0], first(first_word)) for s in found)


@rule("last_word:last_word_answer")
def ends_with_word(text: str, last_word: Word) -> bool:
    """The text ends with the word, apart from punctuation."""
    return same(re.sub(r"[^\w\s]", "", text.split()[-1]), first(last_word))


@rule("last_word:last_word_sent")
def sentences_end_with(text: str, last_word: Word) -> bool:
    """Each sentence ends with the word, apart from punctuation."""
    found = simple_sentences(text)
    return all(s.split() and ends_with_word(s, last_word) for s in found)


# --- Copies ---


@rule("combination:repeat_prompt")
def begins_with_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text begins with the prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@rule("copy:copy", "copy:copying_simple")
def copy(text: str, prompt_to_repeat: str) -> bool:
    """The text is the prompt and nothing else."""
    return same(text, prompt_to_repeat)


@rule("copy:copying_multiple")
def copies(text: str, prompt_to_repeat: str, N: float) -> bool:
    """The text is the prompt N times, separated by six asterisks."""
    pieces = text.split("******")
    return len(pieces) == N and all(same(piece, prompt_to_repeat) for piece in pieces)


@rule("new:copy_span_idx")
def copied_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The text is the prompt's characters from one index to another."""
    return same(text, prompt_to_repeat[n_start:n_end])


@rule("copy:repeat_phrase")
def varied_phrase(text: str, phrase: str, small_n: float) -> bool:
    """The phrase appears n times, each with at most one word changed, the last with exactly one."""
    words = phrase.split()
    found = [part.split() for part in re.findall(f"{words[0]} .*? {words[-1]}", text)]
    if len(found) != small_n or not found or any(len(part) != len(words) for part in found):
        return False
    changed = [sum(a != b for a, b in zip(part, words, strict=True)) for part in found]
    return max(changed) <= 1 and changed[-1] == 1
