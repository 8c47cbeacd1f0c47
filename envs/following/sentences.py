"""Splits a text into words and sentences, as the rules for instructions count them.

Nothing is downloaded.
"""

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.punkt import PunktSentenceTokenizer

# With these words, Punkt splits texts as with its own model of English, which would have to be
# downloaded: abbreviations, words that begin a sentence after an abbreviation if they are
# capitalised, and words that do so after an initial.
ABBREVIATIONS = """a.m adm ala ariz aug ave bros c calif chg cie co col colo conn corp cos ct d d.c
dec dr e f feb fla fri ft g ga gen h ill inc jan jr k kan ky l l.a lt ltd m m.b.a maj messrs mg mich
minn mr mrs ms n n.c n.j n.y nev nov oct ok okla ore p p.m pa ph.d prof r rep reps s sen sep sept sr
st sw t tenn tues u.k u.n u.s u.s.a v va vs vt w w.va wash wed wis yr"""
BEGINNINGS = """above according although always among being better between both but consider despite
does enough ensure even example explain final finally furthermore given he her here him however i if
imagine in indeed instead into it letters list many meanwhile moreover most need nevertheless note
otherwise overall please question remember right same section sentence similarly since so some still
such thank thanks the them there these they things think this though through thus title together try
under us using very were when whether which while without words yes yet your"""
COMMON = """a about after again against all also an and another any as at back because before big by
can chapter children could day days did do down during each energy every few first food for from get
go good great has have his how is its just last left less let letter life like little love make
making may more much music must my never new next no not now of often old on once one only or other
others our out over own part people perhaps rather say see she should small something take tell than
that their then those three time to today too two until up use want was water way we well what where
who why will with work world would write you young"""
# The replacements that IFEval's own splitter makes, in order; <prd> is a dot that does not end a
# sentence, and <stop> marks the end of a sentence.
LETTER = "([A-Za-z])"
STARTER = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s"
    r"|That\s|This\s|Wherever)"
)
SUFFIX = "(Inc|Ltd|Jr|Sr|Co)"
STEPS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"(Mr|St|Mrs|Ms|Dr)[.]", r"\1<prd>"),
    (r"[.](com|net|org|io|gov|edu|me)", r"<prd>\1"),
    (r"([0-9])[.]([0-9])", r"\1<prd>\2"),
    (r"\.{2,}", lambda dots: "<prd>" * len(dots[0]) + "<stop>"),
    (r"Ph\.D\.", "Ph<prd>D<prd>"),
    (rf"\s{LETTER}[.] ", r" \1<prd> "),
    (rf"([A-Z][.][A-Z][.](?:[A-Z][.])?) {STARTER}", r"\1<stop> \2"),
    (rf"{LETTER}[.]{LETTER}[.]{LETTER}[.]", r"\1<prd>\2<prd>\3<prd>"),
    (rf"{LETTER}[.]{LETTER}[.]", r"\1<prd>\2<prd>"),
    (rf" {SUFFIX}[.] {STARTER}", r" \1<stop> \2"),
    (rf" {SUFFIX}[.]", r" \1<prd>"),
    (rf" {LETTER}[.]", r" \1<prd>"),
    (r"\.\u201d", "\u201d."),
    (r'\."', '".'),
    (r'!"', '"!'),
    (r'\?"', '"?'),
    (r"([.?!])", r"\1<stop>"),
    ("<prd>", "."),
]


@functools.cache
def punkt() -> "PunktSentenceTokenizer":
    """Returns NLTK's Punkt with the words above."""
    from nltk.tokenize import punkt as nltk

    small = nltk._ORTHO_MID_LC
    also_inside = nltk._ORTHO_MID_LC | nltk._ORTHO_MID_UC
    known = nltk.PunktParameters()
    known.abbrev_types.update(ABBREVIATIONS.split())
    known.ortho_context.update(dict.fromkeys(BEGINNINGS.split(), small))
    known.ortho_context.update(dict.fromkeys(COMMON.split(), also_inside))
    return nltk.PunktSentenceTokenizer(known)


def sentences(text: str) -> list[str]:
    """Returns the sentences that number_sentences counts."""
    return list(punkt().tokenize(text))


def tokens(text: str) -> list[str]:
    """Returns the words and marks of a text, as NLTK's word_tokenize splits them."""
    from nltk.tokenize.destructive import NLTKWordTokenizer

    split = NLTKWordTokenizer().tokenize
    return [token for sentence in sentences(text) for token in split(sentence)]


def simple_sentences(text: str) -> list[str]:
    """Returns the sentences for all other checks, by IFEval's rules: each mark ends a sentence."""
    text = f" {text}  ".replace("\n", " ")
    for pattern, new in STEPS:
        text = re.sub(pattern, new, text)
    found = [sentence.strip() for sentence in text.split("<stop>")]
    return found if found[-1] else found[:-1]
