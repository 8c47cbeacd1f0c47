"""Prompts as the model sees them."""

import pytest
from conftest import save_tokenizer, spelling_rows

from configs import InputError, check_model
from rows import load_tokenizer, render


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The character tokenizer of the tests."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


def test_a_conversation_ends_where_the_answer_begins(tokenizer):
    ids = render(tokenizer, spelling_rows(1)[0], thinking=True)
    word = spelling_rows(1)[0]["metadata"]["word"]
    assert tokenizer.decode(ids) == f"<user>{word}<bot>"


def test_parts_of_the_responses_api_are_joined(tokenizer):
    row = spelling_rows(1)[0]
    parts = [{"type": "input_text", "text": "spell "}, {"type": "input_text", "text": "this"}]
    row["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    assert tokenizer.decode(render(tokenizer, row, thinking=True)) == "<user>spell this<bot>"


def test_a_model_without_chat_template_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="chat_template"):
        check_model(str(tmp_path))
