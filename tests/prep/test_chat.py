"""Conversations: rendered as transformers does, assistant parts found exactly."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.chat import ChatTemplate
from dflash_prep.errors import Reject, UserError
from tests.prep.support import END, chat

TEXT = st.text(max_size=20)


def said(tokenizer, template: str, messages: list[dict]) -> list[str]:
    """The parts of the rendering that a template's assistant speaks."""
    conversation = ChatTemplate(replace(tokenizer, template=template)).conversation(messages)
    return [conversation.text[start:end] for start, end in conversation.spans]


@given(st.lists(TEXT, min_size=2, max_size=6), st.none() | TEXT)
def test_rendering_equals_transformers(tiny, tiny_reference, contents, system):
    messages = [*([{"role": "system", "content": system}] if system is not None else []), *chat(*contents)]
    template = ChatTemplate(tiny)
    expected = tiny_reference.apply_chat_template(messages, tokenize=False)
    assert template.render(messages) == expected
    conversation = template.conversation(messages)
    assert conversation.text == expected
    assert [expected[start:end] for start, end in conversation.spans] == contents[1::2]


def test_a_lone_surrogate_and_a_missing_assistant_are_refused(tiny):
    template = ChatTemplate(tiny)
    for messages in (chat("a", "b\ud800"), chat("\udfff", "b")):
        with pytest.raises(Reject, match="lone surrogate"):
            template.conversation(messages)
    with pytest.raises(Reject, match="no assistant turn"):
        template.conversation(chat("a"))


TURNS = (
    "{% for message in messages %}<{{ message.role }}>{{ BODY }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_trims_is_followed(tiny):
    template = TURNS.replace("BODY", "message.content.strip()")
    assert said(tiny, template, chat(" a ", " \n b\n", "c", "d")) == ["b", "d"]


def test_trimmed_content_is_not_looked_for_in_a_later_turn(tiny):
    template = TURNS.replace("BODY", "message.content.strip()")
    assert said(tiny, template, chat("a", " b ", "and b or c", "d")) == ["b", "d"]


def test_what_a_template_puts_before_the_content_is_not_mistaken_for_it(tiny):
    """An answer that is part of the thinking block before it must still be found after it."""
    template = TURNS.replace("BODY", "('<think>\\n\\n</think>' if message.role == 'assistant' else '') + message.content")
    assert said(tiny, template, chat("a", "hi", "b", "h")) == ["<think>\n\n</think>hi", "<think>\n\n</think>h"]


def test_thinking_that_the_template_drops_is_in_neither_text_nor_loss(tiny):
    template = TURNS.replace("BODY", "message.content.split('</think>')[-1].lstrip()")
    assert said(tiny, template, chat("a", "<think>b</think> b", "c", "d")) == ["b", "d"]


def test_thinking_that_the_template_takes_apart_and_puts_back_is_found(tiny):
    """Qwen3's way: thinking is split off the content and written before it, empty where there is none."""
    body = (
        "('<think>' + (message.content.split('</think>')[0].replace('<think>', '') if '</think>' in message.content "
        "else '') + '</think>' if message.role == 'assistant' else '') + message.content.split('</think>')[-1]"
    )
    template = TURNS.replace("BODY", body)
    assert said(tiny, template, chat("a", "<think>x</think>b")) == ["<think>x</think>b"]
    assert said(tiny, template, chat("a", "think")) == ["<think></think>think"]


TRIMS = {
    "| trim": str.strip,
    ".strip('\\n')": lambda text: text.strip("\n"),
    ".lstrip('\\n')": lambda text: text.lstrip("\n"),
    ".rstrip()": str.rstrip,
}


@pytest.mark.parametrize("trim", TRIMS)
@given(contents=st.lists(st.text(st.sampled_from(" \nab"), max_size=6), min_size=2, max_size=6))
def test_every_way_of_trimming_is_followed(tiny, trim, contents):
    template = TURNS.replace("BODY", f"message.content {trim}")
    assert said(tiny, template, chat(*contents)) == [TRIMS[trim](content) for content in contents][1::2]


def test_an_empty_answer_has_an_empty_place(tiny):
    assert said(tiny, tiny.template, chat("a", "", "b", "c")) == ["", "c"]


def test_equal_answers_each_have_their_own_place(tiny):
    conversation = ChatTemplate(tiny).conversation(chat("yes", "yes", "yes", "yes"))
    (first, second) = conversation.spans
    assert first[1] < second[0]
    assert [conversation.text[slice(*span)] for span in conversation.spans] == ["yes", "yes"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[99].content }}",
        "{{ messages[0].content.missing() }}",
        "{{ 1 + messages }}",
        "{{ 1 // 0 }}",
        "{{ 10.0 ** 1000 }}",
        "{{ range(10 ** 10) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_rejects_the_record_alone(tiny, template):
    with pytest.raises(Reject, match="template error"):
        ChatTemplate(replace(tiny, template=template)).conversation(chat("a", "b"))


def test_a_template_that_does_not_compile_or_is_not_there_is_a_user_error(tiny):
    for template in ("{% if %}", "{{" + "(" * 5_000, "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000, "{% for a in b %}" * 30):
        with pytest.raises(UserError, match="does not compile"):
            ChatTemplate(replace(tiny, template=template))
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(replace(tiny, template=None))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{%- for m in messages %}\n  {%- if loop.index > 2 %}{% break %}{% endif %}\n {{ m.content | trim }}\n{%- endfor %}",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ tools is none }}|{{ undefined_name }}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endif %}{% endfor %}",
    ],
)
def test_template_features_render_as_in_transformers(tiny, tiny_reference, template):
    messages = chat("<a> & 'é'\n", "b", "c", "\u2028d ")
    expected = tiny_reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ChatTemplate(replace(tiny, template=template)).render(messages) == expected


CALLS = [{"type": "function", "function": {"name": name, "arguments": {"x": 1}}} for name in ("look", "buy")]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# As Qwen3 has it: tools up front, calls after the content, an empty thinking block before the last turn alone
TOOL_TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@given(st.lists(st.sampled_from(["a", "", "say <call>", "look", "<|im_end|>"]), min_size=6, max_size=6), st.booleans())
def test_tool_calls_are_what_the_assistant_says(tiny, tiny_reference, contents, offered):
    tools = TOOLS if offered else None
    messages = [
        *chat(contents[0]),
        {"role": "assistant", "content": contents[1], "tool_calls": CALLS},
        {"role": "tool", "name": "look", "content": contents[2]},
        {"role": "assistant", "content": contents[3], "tool_calls": CALLS[:1]},
        {"role": "tool", "name": "look", "content": contents[4]},
        {"role": "assistant", "content": contents[5]},
    ]
    conversation = ChatTemplate(replace(tiny, template=TOOL_TEMPLATE)).conversation(messages, tools)
    assert conversation.text == tiny_reference.apply_chat_template(
        messages, tools=tools, chat_template=TOOL_TEMPLATE, tokenize=False
    )
    calls = ["".join(f"<call>{json.dumps(call['function'])}</call>" for call in part) for part in (CALLS, CALLS[:1], [])]
    said = [content + call for content, call in zip(contents[1::2], calls, strict=True)]
    texts = [conversation.text[start:end] for start, end in conversation.spans]
    assert texts == [said[0], said[1], "<think></think>" + said[2]]


def test_a_template_that_leaves_out_tool_calls_is_not_followed(tiny):
    with pytest.raises(Reject, match="leaves out tool calls"):
        ChatTemplate(tiny).conversation([*chat("a"), {"role": "assistant", "content": "", "tool_calls": CALLS}])


def test_a_tokenizer_may_have_a_template_for_tools(tiny):
    template = ChatTemplate(replace(tiny, template="plain", tool_template="{{ tools[0].function.name }}"))
    assert template.render(chat("a")) == "plain"
    assert template.render(chat("a"), tools=TOOLS) == "look"


def test_arguments_reach_the_template_as_in_transformers(tiny, tiny_reference):
    body = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ bos_token }}{{ n }}"
    for arguments in ({}, {"enable_thinking": False}, {"enable_thinking": True, "n": 5, "bos_token": "b"}):
        expected = tiny_reference.apply_chat_template(chat("a"), chat_template=body, tokenize=False, **arguments)
        assert ChatTemplate(replace(tiny, template=body), arguments).render(chat("a")) == expected


@pytest.mark.parametrize("loss", ["last-assistant", "all"])
def test_loss_on_the_last_answer_or_on_everything(tiny, loss):
    """The last answer is found even where the template changes earlier ones."""
    template = TURNS.replace("BODY", "message.content if loop.last else message.content.split('</think>')[-1]")
    conversation = ChatTemplate(replace(tiny, template=template)).conversation(
        chat("a", "<think>x</think>b", "c", "<think>y</think>d"), loss=loss
    )
    said = [conversation.text[start:end] for start, end in conversation.spans]
    assert said == (["<think>y</think>d"] if loss == "last-assistant" else [conversation.text])
    assert len(ChatTemplate(tiny).conversation(chat("a"), loss="all").spans) == 1


# The prompt says what the turn says only under a condition on the conversation, and the turn opens with it or not
MOODS = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}{% if '/quiet' in m.content %}{% set ns.quiet = true %}"
    "{% endif %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if ns.quiet %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)


def test_where_a_turn_begins_depends_on_its_own_conversation_alone(tiny):
    """Whatever was rendered before: a worker sees some of the records only."""
    loud, quiet = chat("a", "b", "c", "d"), chat("a /quiet", "b", "c", "d")
    expected = {"loud": ["</think>b", "</think>d"], "quiet": ["b", "d"]}
    for order in (("loud", "quiet"), ("quiet", "loud"), ("quiet", "quiet"), ("loud", "loud")):
        template = ChatTemplate(replace(tiny, template=MOODS))
        for name in order:
            found = template.conversation({"loud": loud, "quiet": quiet}[name])
            assert [found.text[start:end] for start, end in found.spans] == expected[name], order


def test_a_prompt_that_opens_what_the_turn_does_not_go_on_with(tiny):
    """As Nemotron has it: the prompt opens thinking with a newline, turns without any close it at once."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert said(tiny, template, chat("a", "b", "c", "d")) == ["<think></think>b", "<think></think>d"]


@pytest.mark.parametrize("shown", ["c or ''", "c | default('', true)", "c if c else ''"])
def test_an_empty_answer_that_leaves_no_trace_costs_no_other_turn(tiny, shown):
    template = TURNS.replace("BODY", re.sub(r"\bc\b", "message.content", shown))
    assert said(tiny, template, chat("a", "", "b", "c")) == ["c"]


@pytest.mark.parametrize("loss", ["assistant", "last-assistant"])
def test_several_generation_tags_a_turn_belong_to_it(tiny, tiny_reference, loss):
    """The end token may have a tag of its own."""
    template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "|{% generation %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    found = ChatTemplate(replace(tiny, template=template)).conversation(chat("a", "b", "c", "d"), loss=loss)
    texts = [found.text[start:end] for start, end in found.spans]
    assert texts == (["b", END, "d", END] if loss == "assistant" else ["d", END])


def test_tojson_takes_its_arguments_in_transformers_order(tiny, tiny_reference):
    for words in ("true", "false, 2", "false, none, [',', ':'], true", "indent=1, sort_keys=true"):
        body = "{{ {'b': 'é', 'a': [1]} | tojson(" + words + ") }}"
        expected = tiny_reference.apply_chat_template(chat("a"), chat_template=body, tokenize=False)
        assert ChatTemplate(replace(tiny, template=body)).render(chat("a")) == expected


def test_strings_format_themselves_as_ever(tiny):
    assert ChatTemplate(replace(tiny, template="{{ messages[0].content.format(7) }}"))._traced(chat("a{}"), None) == "a7"
