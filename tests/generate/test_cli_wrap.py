"""Answers on a terminal: words stay whole, lines fit, nothing reaches the terminal but text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exl_generate.cli.terminal import Wrapper

rich_cells = pytest.importorskip("rich.cells")


def wrapped(text: str, width: int, cuts: list[int] | None = None) -> str:
    wrapper = Wrapper(lambda: width)
    places = sorted({min(cut, len(text)) for cut in cuts or []})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return "".join(map(wrapper.feed, pieces)) + wrapper.flush()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 8, "one two\nthree"),
        ("one two", 7, "one two"),
        ("  \n one", 20, "one"),
        ("a  b\n    indented", 20, "a  b\n    indented"),
        ("a\n\t\t\tone", 8, "a\n     one"),
        ("a verylongwordindeed b", 10, "a\nverylongwordindeed\nb"),
        ("中文中文中文", 5, "中文\n中文\n中文"),
        ("see:\n```\nx = call(1, 2, 3)\n```\none two three", 8, "see:\n```\nx = call(1, 2, 3)\n```\none two\nthree"),
        ("a\x1b[2Jb\x07\x9b", 20, "a\ufffd[2Jb\ufffd\ufffd"),
        ("a\u202eb\u2066c\u200fd\ufeff\U000e0041", 20, "a\ufffdb\ufffdc\ufffdd\ufffd\ufffd"),
        (
            "\u0646\u200c\u0645 \U0001f468\u200d\U0001f469 \u2764\ufe0f",
            20,
            "\u0646\u200c\u0645 \U0001f468\u200d\U0001f469 \u2764\ufe0f",
        ),
        ("a\tb", 20, "a    b"),
        ("", 20, ""),
    ],
)
def test_examples(text: str, width: int, shown: str) -> None:
    assert wrapped(text, width) == shown


words = st.lists(st.text("abcé中…\n\t `", min_size=0, max_size=12), max_size=20).map(" ".join)


@given(words, st.integers(4, 30), st.lists(st.integers(0, 200), max_size=8))
def test_pieces_do_not_matter(text: str, width: int, cuts: list[int]) -> None:
    assert wrapped(text, width, cuts) == wrapped(text, width)


@given(words, st.integers(4, 30))
@example("`\n\t \t`", 9)
def test_lines_fit_and_no_word_is_lost(text: str, width: int) -> None:
    text = text.replace("```", "")
    shown = wrapped(text, width)
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        pieces = line.split()
        longest = max((rich_cells.cell_len(piece) for piece in pieces), default=0)
        assert rich_cells.cell_len(line.rstrip()) <= width or longest > width - 8


@given(st.text(st.characters() | st.characters(categories=["Cc", "Cf"]), max_size=60), st.integers(4, 30))
def test_no_control_character_reaches_the_terminal(text: str, width: int) -> None:
    assert not [
        c for c in wrapped(text, width) if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\u200c\u200d"
    ]
