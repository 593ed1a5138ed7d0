"""docs/errors.md has every message of gpuload's own errors once, under a heading, with what to do."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from project.documentation.messages import MAKERS, has_own_words, made_messages, raised_messages

PAGE = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n### ")[1:]}
# Where messages come from `MAKERS`, from another process or from another error: how many such places there are.
PASSED_ON = {
    "datasets/files.py": 1,
    "datasets/recognise.py": 1,
    "decode/decoder.py": 1,
    "decode/header.py": 2,
    "loader/replay.py": 1,
    "loader/session.py": 2,
    "packing/pool.py": 1,
    "ring/ring.py": 2,
    "stage/dali/backend.py": 1,
    "stage/fused/backend.py": 1,
    "stage/kornia/backend.py": 1,
    "stage/stage.py": 2,
}


def join_lines(text: str) -> str:
    return " ".join(text.split())


def messages_on_page() -> list[str]:
    blocks = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    return [join_lines(message) for block in blocks for message in block.split("\n\n")]


def test_errors_page_has_each_message_once():
    known = {
        join_lines(message.text): message
        for message in (*raised_messages(), *made_messages())
        if has_own_words(message.text)
    }
    missing = [f"{place}:{line}: {text}" for text, (_, place, line) in known.items() if text not in messages_on_page()]
    assert missing == [], "docs/errors.md lacks messages: give each a place under a heading there"
    assert sorted(set(messages_on_page()) - set(known)) == [], "docs/errors.md has messages that are nowhere in gpuload"
    assert [text for text, times in Counter(messages_on_page()).items() if times > 1] == []


def test_passed_on_messages_come_from_known_makers():
    silent = Counter(message.place for message in raised_messages() if not has_own_words(message.text))
    assert silent == Counter(PASSED_ON), "a message is made elsewhere: add that function to MAKERS in messages.py"
    places = Counter(message.place for message in made_messages())
    assert set(MAKERS) | {"errors.py", "packing/pack.py"} == set(places)


def test_each_section_says_why_and_what_to_do():
    assert len(SECTIONS) > 30
    assert [name for name, text in SECTIONS.items() if "\n- **Why**: " not in text] == []
    assert [name for name, text in SECTIONS.items() if "\n- **What to do**: " not in text] == []
    assert [name for name, text in SECTIONS.items() if "```text\n" not in text] == []
