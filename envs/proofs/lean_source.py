"""The proof in an answer of envs/proofs/lean.py. No environment by itself."""

import re

LANGUAGES = ("lean4", "lean3", "lean", "")


def code_of(text: str) -> str:
    """The last fenced block of the first language that has one, else the text without fences."""
    if code := code_block(text):
        return code
    text = re.sub(r"\A\s*```(?:lean4|lean3|lean)?", "", text).strip()
    return text.removesuffix("```").strip()


def code_block(text: str, languages: tuple[str, ...] = LANGUAGES) -> str:
    """The last block that any of the languages opens, the first of them that has one."""
    for language in languages:
        found, at = None, 0
        while (start := text.find("```" + language, at)) >= 0:
            start += 3 + len(language)
            if (end := text.find("```", start)) < 0:
                break
            found, at = text[start:end], end + 3
        if found is not None:
            return found.strip()
    return ""


def proof_of(code: str) -> str:
    """What follows the `:=` and `by` of the first theorem or example; all code where none is."""
    lines = code.strip().splitlines()
    heads = (i for i, line in enumerate(lines) if re.match(r"\s*(?:theorem|example)\b", line))
    first = next(heads, len(lines))
    assigned = (i for i in range(first, len(lines)) if ":=" in lines[i])
    if (at := next(assigned, None)) is None:
        return code.strip()
    same_line = lines[at].split(":=", 1)[1].strip()
    proof = [same_line] * bool(same_line) + lines[at + 1 :]
    head = proof[0].lstrip() if proof else ""
    if head == "by":
        proof = proof[1:]
    elif head.startswith("by "):
        proof[0] = head[3:]
    return "\n".join(proof).rstrip()
