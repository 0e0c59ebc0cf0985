"""Traced strings: the strings they are, and parts that say where each character came from."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.template import TracingEnvironment
from dflash_prep.traced import Traced, joined, origins, parts_of, plain, traced

TEXT = st.text(st.sampled_from(" \nab<é"), max_size=8)
OPERATIONS = {
    "strip": lambda text, other: text.strip(),
    "strip of": lambda text, other: text.strip("a \n"),
    "lstrip": lambda text, other: text.lstrip(),
    "rstrip": lambda text, other: text.rstrip("b"),
    "slice": lambda text, other: text[1:-1],
    "from": lambda text, other: text[2:],
    "nothing": lambda text, other: text[3:1],
    "first of split": lambda text, other: text.split("<")[0],
    "last of split": lambda text, other: text.split("<")[-1],
    "second word": lambda text, other: ([*text.split(), text, text])[1],
    "rsplit": lambda text, other: text.rsplit("a", 1)[-1],
    "partition": lambda text, other: text.partition("a")[2],
    "before": lambda text, other: other + text,
    "after": lambda text, other: text + other,
    "twice": lambda text, other: text + text,
    "replace": lambda text, other: text.replace("ab", other),
    "replace once": lambda text, other: text.replace("a", "xy", 1),
    "prefix": lambda text, other: text.removeprefix("a"),
    "suffix": lambda text, other: text.removesuffix("b"),
    "upper": lambda text, other: text.upper(),
    "format": lambda text, other: f"{text}",
    "percent": lambda text, other: "%s" % text,  # noqa: UP031
    "letter": lambda text, other: text[0] if text else text,
}


@given(TEXT, TEXT, st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=6))
def test_whatever_is_done_the_string_is_what_it_would_be_and_the_parts_are_true(content, other, names):
    """Each character of a part must be the one that its origin has at the place that it came from."""
    letters = [traced(letter, place, content) for place, letter in enumerate(content)]
    text, expected = joined(["", *letters]) if content else traced("", 0, content), content
    for name in names:
        text, expected = OPERATIONS[name](text, other), OPERATIONS[name](expected, other)
    assert text == expected
    assert hash(text) == hash(expected)
    for start, end, (place, origin) in parts_of(text):
        assert 0 <= start <= end <= len(text)
        assert text[start:end] in (origin[place : place + 1], "")
    assert type(plain(text)) is str
    assert plain(text) == expected


@given(st.lists(TEXT, min_size=1, max_size=6))
def test_a_join_knows_where_each_piece_is(pieces):
    marked = [traced(piece, number, "x") if number % 2 else piece for number, piece in enumerate(pieces)]
    text = joined(marked)
    assert text == "".join(pieces)
    assert [(text[start:end], owner) for start, end, (owner, _) in parts_of(text)] == [
        (piece, number) for number, piece in enumerate(pieces) if number % 2
    ]


def test_only_the_values_of_json_are_traced():
    value = {"a": ["x", 1, None, {"b": "y"}], "c": True}
    marked = traced(value, 7, "said")
    assert marked == value
    assert origins(marked) == {(7, "said.a.0"), (7, "said.a.3.b")}
    assert origins(value) == origins([1, None]) == set()
    assert not isinstance(next(iter(marked)), Traced)


TEMPLATES = {
    "{{ text }}": 1,
    "{{ 'a' + text + 'b' }}": 1,
    "{{ 'a' ~ text ~ 3 }}": 1,
    "{{ text | trim }}": 1,
    "{% set kept %}<{{ text }}>{% endset %}{{ kept }}": 1,
    "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(text) }}{{ m(text) }}": 2,
    "{% for c in [text, text] %}{{ c }}{% endfor %}": 2,
    "{% if text is string and 'b' in text %}{{ text.split('b')[-1].lstrip('\\n') }}{% endif %}": 1,
    "{% filter trim %}  {{ text }} {% endfilter %}": 1,
    "{{ {'x': text} | tojson }}": 1,
    "{% generation %}{{ text }}{% endgeneration %}": 2,
    "{{ text | upper }}": 0,
    "{{ text.__class__ }}{{ text._parts }}{{ text | length }}": 0,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_jinja_keeps_strings_traced_and_renders_the_same(template):
    usual = jinja2.Environment(extensions=["jinja2.ext.do"])
    environment = TracingEnvironment()
    text = "a b\nc "
    rendered = environment.from_string(template).render(text=traced(text, 5, "x"))
    assert len(parts_of(rendered)) == TEMPLATES[template]
    assert rendered == environment.from_string(template).render(text=text)
    if "generation" not in template and "tojson" not in template and "__" not in template:
        assert rendered == usual.from_string(template).render(text=text)
