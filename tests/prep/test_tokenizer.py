"""Loading a tokenizer and its template by directory; what its fingerprints depend on."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.errors import UserError
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import BOS, CHATML, END, make_tokenizer


@pytest.fixture
def copy(tiny_directory, tmp_path):
    """A copy of the tiny tokenizer's directory, to be changed."""
    return shutil.copytree(tiny_directory, tmp_path / "copy")


def test_what_a_directory_holds(tiny):
    assert tiny.template == CHATML
    assert tiny.named_tokens == {"bos_token": BOS, "eos_token": END, "pad_token": "<|pad|>"}
    assert tiny.special_ids == {0, 1, 2, 3}


@given(st.text(max_size=60))
def test_the_encoder_adds_nothing_and_covers_the_text(tiny, text):
    encoding = tiny.encoder.encode(text, add_special_tokens=True)
    assert tiny.backend.decode(encoding.ids, skip_special_tokens=False) == text
    covered = set()
    for start, end in encoding.offsets:
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))


def test_truncation_and_padding_of_the_file_are_not_applied(copy):
    settings = json.loads((copy / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    before = load_tokenizer(str(copy))
    (copy / "tokenizer.json").write_text(json.dumps(settings))
    after = load_tokenizer(str(copy))
    text = "one line after another, and 12 more"
    assert after.encoder.encode(text).ids == before.encoder.encode(text).ids
    assert after.fingerprint == before.fingerprint


def test_fingerprints_tell_tokenizers_and_templates_apart(copy):
    before = load_tokenizer(str(copy))
    (copy / "chat_template.jinja").write_text(CHATML + " ")
    template = load_tokenizer(str(copy))
    assert template.fingerprint == before.fingerprint
    assert template.template_fingerprint != before.template_fingerprint
    settings = json.loads((copy / "tokenizer.json").read_text())
    settings["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(copy)).fingerprint != before.fingerprint
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": END}}))
    named = load_tokenizer(str(copy))
    assert named.named_tokens["bos_token"] == END
    assert named.template_fingerprint != template.template_fingerprint


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ("{{ a }}", "{{ a }}"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        ([{"name": "tool_use", "template": "x"}], None),
    ],
)
def test_the_template_may_stand_in_the_configuration(copy, stated, found):
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    assert load_tokenizer(str(copy)).template == found


def test_a_template_file_goes_before_the_configuration(copy):
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    assert load_tokenizer(str(copy)).template == CHATML


def test_a_template_may_be_chosen_by_file_or_by_name(copy, tmp_path):
    named = [{"name": name, "template": f"{name} body"} for name in ("default", "tool_use", "rag")]
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_tokenizer(str(copy))
    assert (found.template, found.tool_template) == ("default body", "tool_use body")
    other = load_tokenizer(str(copy), "rag")
    assert (other.template, other.tool_template) == ("rag body", None)
    assert other.template_fingerprint != found.template_fingerprint
    (tmp_path / "mine.jinja").write_text("{{ mine }}")
    assert load_tokenizer(str(copy), str(tmp_path / "mine.jinja")).template == "{{ mine }}"
    with pytest.raises(UserError, match=r"nowhere: no such file.*own are default, rag, tool_use"):
        load_tokenizer(str(copy), "nowhere")
    with pytest.raises(UserError, match="name a file"):
        load_tokenizer(str(copy), str(tmp_path))
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        load_tokenizer(str(copy), str(tmp_path / "latin.jinja"))


def test_templates_in_files_of_their_own(copy):
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    found = load_tokenizer(str(copy))
    assert (found.template, found.tool_template) == (CHATML, "with tools")


def test_faults_are_named(tmp_path, copy):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (copy / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_tokenizer(str(copy))
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(str(copy))
    for name in ("./nowhere", str(tmp_path / "nowhere"), "nowhere", "a/b/c"):
        with pytest.raises(UserError, match="no such directory"):
            load_tokenizer(name)


def test_a_hub_id_that_is_not_to_be_had_is_one_line(monkeypatch):
    import huggingface_hub

    def refuse(*arguments, **options):
        raise OSError("no network here\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=r"owner/name: .*no network here$"):
        load_tokenizer("owner/name")


def test_a_hub_id_is_read_from_its_snapshot(monkeypatch, tmp_path):
    import huggingface_hub

    directory = make_tokenizer(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(directory))
    loaded = load_tokenizer("owner/name")
    assert (loaded.name, loaded.template) == ("owner/name", CHATML)


@pytest.mark.parametrize(
    "template", [3, True, {"default": "x"}, ["x"], [{"name": "default"}], [{"name": [], "template": "x"}]]
)
def test_a_template_of_another_kind_is_a_user_error(copy, template):
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match="chat_template is neither text nor a list"):
        load_tokenizer(str(copy))


def test_a_template_that_cannot_be_read_is_a_user_error(copy):
    file = copy / "chat_template.jinja"
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load_tokenizer(str(copy))
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="is a directory"):
        load_tokenizer(str(copy))
    file.rmdir()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\ud800"}))
    with pytest.raises(UserError, match="not UTF-8"):
        load_tokenizer(str(copy))
    (copy / "tokenizer_config.json").write_text('{"chat_template": ' + "[" * 100_000)
    with pytest.raises(UserError, match="not valid JSON"):
        load_tokenizer(str(copy))
