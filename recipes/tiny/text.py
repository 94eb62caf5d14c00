"""Broad text for the tokenizer: prose, Python, JSON, Markdown and other scripts, made from small word lists.

Owns: what the tokenizer sees beside the corpus, so that the whole vocabulary is used and no byte is strange to it.
Never: reaches the model, which learns from `corpus` only.
"""

import json
import random
from collections.abc import Iterator

# ruff: noqa: SIM905  (a list of words reads best as words)
DETERMINERS = "the a this that each every some any no another our their your his her its".split()
NOUNS = """time person year way day thing man world life hand part child eye woman place work week case point
company number group problem fact people water room mother area money story month lot right study book word business
issue side kind head house service friend father power hour game line end member law car city name team minute idea
body information back parent face level office door health art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music market sense nation plan college
interest death experience effect use class control field development role effort rate heart drug show leader light
voice wife police mind price report decision view relation town road arm difference value building action season
society tax director position player record paper space ground form event official matter center couple site project
model policy reward token step answer question server message error value list string function state""".split()
VERBS = """is was has had does did says goes gets makes knows thinks takes sees comes wants looks uses finds gives
tells works calls tries asks needs feels becomes leaves puts means keeps lets begins seems helps talks turns starts
shows hears plays runs moves likes lives believes holds brings happens writes provides sits stands loses pays meets
includes continues sets learns changes leads understands watches follows stops creates speaks reads allows adds
spends grows opens walks wins offers remembers loves considers appears buys waits serves dies sends expects builds
stays falls cuts reaches kills remains""".split()
ADJECTIVES = """good new first last long great little own other old right big high different small large next early
young important few public bad same able human local sure free better true whole clear hard recent certain strong
possible simple open full special easy ready common single short""".split()
LINKS = "and but or so because if when while although that which who where than then as".split()
PREPOSITIONS = "of in to for with on at from by about into over after under between through against during".split()
PYTHON = (
    "def {a}(self, {b}: int) -> str:\n    return self.{b}[{a}]\n",
    "for {a} in range({n}):\n    print({a}, {b})\n",
    "import {a}\nfrom {a} import {b}\n\n\nclass {a}:\n    pass\n",
    'if {a} is not None and {b} == {n}:\n        raise ValueError(f"{{{a}}} is {b}")\n',
    "{a} = [x for x in {b} if x != {n}]  # {a}\n",
    "with open({a}) as {b}:\n    {a} += {b}.read()\n",
    "    assert {a} <= {n}, '{b}'\n",
)
SCRIPTS = (
    "áéíóúñüßöäçèêàâîôœøåæ ÁÉÖÄÜ ¿¡ „“ ”‚‘’ « » – — … • · ° § ± × ÷ € £ ¥ © ® ™",
    "привет мир это простой текст на русском языке и слово",
    "καλημέρα κόσμε αυτό είναι ένα κείμενο",
    "你好世界 这是 一个 简单的 问题 我们 学习 中文",
    "こんにちは 世界 これは テスト です 日本語",
    "안녕하세요 세계 이것은 시험 입니다",
    "مرحبا بالعالم هذا نص بسيط שלום עולם",
    "नमस्ते दुनिया यह एक सरल पाठ है",
    "🎲 🎈 😀 👍 ❤️ ✅ ❌ 🚀 → ← ↑ ↓ ⇒ ≤ ≥ ≠ ≈ ∞ ∑ √ π α β γ",
)


def broad_text(rng: random.Random) -> Iterator[str]:
    """Paragraphs without end: most are prose, every fourth is of another kind."""
    while True:
        yield from (_paragraph(rng) for _ in range(3))
        yield rng.choice((_python, _json, _markdown, _script))(rng)


def _paragraph(rng: random.Random) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.randint(2, 5)))


def _sentence(rng: random.Random) -> str:
    words = _clause(rng)
    if rng.random() < 0.4:
        words += [rng.choice((",", "")) + " " + rng.choice(LINKS), *_clause(rng)]
    text = " ".join(words).replace(" ,", ",").replace("  ", " ")
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "?", "!", ":", ";"))


def _clause(rng: random.Random) -> list[str]:
    subject = rng.choice(("I", "you", "he", "she", "it", "we", "they", "there")) if rng.random() < 0.3 else None
    words = [subject] if subject else _thing(rng)
    words += [rng.choice(VERBS), *_thing(rng)]
    if rng.random() < 0.5:
        words += [rng.choice(PREPOSITIONS), *_thing(rng)]
    return words


def _thing(rng: random.Random) -> list[str]:
    adjective = [rng.choice(ADJECTIVES)] if rng.random() < 0.4 else []
    return [rng.choice(DETERMINERS[:4] if rng.random() < 0.6 else DETERMINERS), *adjective, rng.choice(NOUNS)]


def _python(rng: random.Random) -> str:
    snippets = rng.sample(PYTHON, 3)
    return "".join(s.format(a=rng.choice(NOUNS), b=rng.choice(NOUNS), n=rng.randint(0, 99)) for s in snippets)


def _json(rng: random.Random) -> str:
    entries = {rng.choice(NOUNS): rng.choice((rng.randint(0, 999), rng.choice(NOUNS), True, None)) for _ in range(4)}
    return json.dumps({"name": rng.choice(NOUNS), "arguments": entries}, indent=rng.choice((None, 2)))


def _markdown(rng: random.Random) -> str:
    items = "\n".join(f"- **{rng.choice(NOUNS)}**: {_sentence(rng)}" for _ in range(3))
    return f"## {rng.choice(NOUNS).title()}\n\n{items}\n\n| {rng.choice(NOUNS)} | `{rng.choice(NOUNS)}` |\n|---|---|\n"


def _script(rng: random.Random) -> str:
    words = rng.choice(SCRIPTS).split()
    return " ".join(rng.choice(words) for _ in range(12))
