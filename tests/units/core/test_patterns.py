"""Patterns of module paths against an oracle that knows parts and nothing of regular expressions."""

from __future__ import annotations

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from ampcheck.core.patterns import matches

PARTS = st.text(alphabet="ab0_", min_size=1, max_size=3) | st.sampled_from(
    ["norm", "layers", "[a]", "a+", "(", "\\d", "$"]
)
PATHS = st.lists(PARTS, max_size=4).map(".".join)
PIECES = st.text(alphabet="ab0_*?", min_size=1, max_size=3).filter(lambda piece: "**" not in piece)
PATTERNS = st.lists(PARTS | PIECES | st.sampled_from(["*", "**", "norm*", "*0"]), max_size=4).map(".".join)


def parts(path: str) -> list[str]:
    """The root has no parts."""
    return path.split(".") if path else []


def piece_matches(piece: str, part: str) -> bool:
    """`*` is any run of characters, `?` one."""
    if not piece:
        return not part
    if piece[0] == "*":
        return any(piece_matches(piece[1:], part[skip:]) for skip in range(len(part) + 1))
    return bool(part) and piece[0] in ("?", part[0]) and piece_matches(piece[1:], part[1:])


def oracle(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(oracle(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and piece_matches(pattern[0], path[0]) and oracle(pattern[1:], path[1:])


@given(PATTERNS, PATHS)
@example("*", "")
@example("**", "")
@example("**.*", "")
@example("**.**", "")
@example("layers.**", "layers")
@example("layers.**", "layers2")
@example("layers.**.**", "layers.0")
@example("**.norm", "norm")
@example("**.norm", "prenorm")
@example("a.**.b", "a.b")
@example("**", "a\nb")
def test_a_pattern_matches_what_the_oracle_says(pattern: str, path: str) -> None:
    expected = oracle(parts(pattern), parts(path))
    event(f"matches: {expected}")
    assert matches(pattern, path) is expected


@given(PATHS, st.data())
def test_a_path_whose_parts_become_stars_matches(path: str, data: st.DataObject) -> None:
    pattern = [data.draw(st.sampled_from([part, "*", "**", part[0] + "*", "*" + part[-1]])) for part in parts(path)]
    for at in reversed(range(len(pattern) + 1)):
        if data.draw(st.booleans()):
            pattern.insert(at, "**")
    assert oracle(pattern, parts(path))
    assert matches(".".join(pattern), path)


@given(PATHS)
def test_a_path_without_wildcards_matches_itself_alone(path: str) -> None:
    assert matches(path, path)
    assert not matches(path, f"{path}.more" if path else "more")
    assert not matches(path, f"{path}x")


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers.*.norm", "layers.0.norm", True),
        ("layers.*.norm", "layers.0.1.norm", False),
        ("layers.*.norm", "layers.norm", False),
        ("**.norm*", "layers.0.norm_1", True),
        ("**.norm*", "norm", True),
        ("**.norm*", "layers.0.norm_1.weight", False),
        ("*", "layers", True),
        ("*", "layers.0", False),
        ("", "", True),
        ("", "layers", False),
        ("**", "", True),
        ("**", "layers.0.norm", True),
        ("layers.**", "layers.0.norm", True),
        ("a.c", "abc", False),
        ("Layers", "layers", False),
        ("layers.1", "layers.10", False),
    ],
)
def test_one_star_is_one_part_two_are_any_number_and_nothing_is_the_root(
    pattern: str, path: str, expected: bool
) -> None:
    assert matches(pattern, path) is expected
    assert oracle(parts(pattern), parts(path)) is expected


def test_two_stars_within_a_part_cross_its_border() -> None:
    assert matches("**norm", "layers.0.prenorm")
    assert matches("layers**norm", "layers.0.norm")
