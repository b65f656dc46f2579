"""The tokenizer: round trips, chat templates, and refusals that name `messages`."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ModelError, RequestError
from tests.small_models import byte_tokenizer

EMBEDDED = Path(__file__).parents[2] / "profiles" / "embedded"

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}"
    "{% endif %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_text_survives_encode_and_decode() -> None:
    """Tokens are bytes, and the text is not normalised."""
    tokenizer = byte_tokenizer()
    text = "Hello , world !\n\tübergrößer 世界 🎉"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("AB") == (65, 66)


def test_special_tokens_have_a_name_but_no_text() -> None:
    """`decode` skips them, `token_text` shows them, and `eos_ids` has the end token."""
    tokenizer = byte_tokenizer()
    assert tokenizer.decode((65, 256, 66)) == "AB"
    assert (tokenizer.token_text(256), tokenizer.token_text(65)) == ("<|end|>", "A")
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == (frozenset({256}), 257)


def test_text_is_that_of_transformers() -> None:
    """With and without special tokens, incomplete characters included. Code of a tokenizer is not bypassed."""
    tokenizer = ChatTokenizer.from_files(EMBEDDED)
    inner = tokenizer._wrapper._tokenizer
    tokens = [*range(tokenizer.vocab_size), *tokenizer.encode("1 + 1 = 2 , ü 世"), 0, 2]
    for skips in (True, False):
        for some in (tokens, tokens[-3:], tokens[130:131], []):
            expected = inner.decode(some, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(some, skip_special_tokens=skips) == expected

    class Shouting(type(inner)):  # type: ignore[misc]
        def _decode(self, *args: object, **settings: object) -> str:
            return str(super()._decode(*args, **settings)).upper()

    inner.__class__ = Shouting
    assert ChatTokenizer(tokenizer._wrapper).decode(tokenizer.encode("abc")) == "ABC"


def test_a_conversation_is_rendered_with_its_special_tokens() -> None:
    """With and without the generation prompt."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    tokens = tokenizer.render_chat(messages)
    assert tokens == (*b"user:hi", 256, *b"assistant:")
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == (*b"user:hi", 256)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (None, [{"role": "user", "content": "hi"}]),
        (TEMPLATE, []),
        (TEMPLATE, [{"role": "wizard", "content": "hi"}]),
        (TEMPLATE, [{"role": "user"}]),
        (TEMPLATE, [{"role": "user", "content": 5}]),
        ("{% for %}", [{"role": "user", "content": "hi"}]),
    ],
    ids=["no template", "no messages", "unknown role", "no content", "content not text", "broken template"],
)
def test_an_invalid_conversation_is_refused(template: str | None, messages: list[object]) -> None:
    """A RequestError names `messages` for any error of the template."""
    tokenizer = byte_tokenizer(chat_template=template)
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(messages)  # type: ignore[arg-type]
    assert caught.value.param == "messages"


def saved(tmp_path: Path) -> Path:
    """Save the byte tokenizer in the format of Hugging Face."""
    byte_tokenizer(chat_template=TEMPLATE)._wrapper.save_pretrained(str(tmp_path))
    return tmp_path


def test_a_tokenizer_is_loaded_from_a_model_directory(tmp_path: Path) -> None:
    """Offline, with template and end token."""
    tokenizer = ChatTokenizer.from_files(saved(tmp_path))
    assert tokenizer.encode("AB") == (65, 66)
    assert tokenizer.eos_ids == {256}
    assert tokenizer.has_chat_template


def test_a_template_of_the_profile_replaces_that_of_the_model(tmp_path: Path) -> None:
    """Its variables are set in every prompt, unless a request sets them."""
    file = tmp_path / "chat.jinja"
    file.write_text("{{ tone }}:{{ messages[0].content }}")
    directory = saved(tmp_path)
    tokenizer = ChatTokenizer.from_files(directory, chat_template=str(file), variables={"tone": "calm"})
    messages = [{"role": "user", "content": "A"}]
    assert tokenizer.decode(tokenizer.render_chat(messages)) == "calm:A"
    assert tokenizer.decode(tokenizer.render_chat(messages, variables={"tone": "loud"})) == "loud:A"
    assert tokenizer.chat_template == file.read_text()
    for contents in (b"{% for", b" ", b"\xff", None):
        file.unlink() if contents is None else file.write_bytes(contents)
        with pytest.raises(ModelError, match=r"model\.chat_template"):
            ChatTokenizer.from_files(directory, chat_template=str(file))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """A missing directory, an empty one, and a damaged file."""
    for directory in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelError, match="tokenizer"):
            ChatTokenizer.from_files(directory)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ChatTokenizer.from_files(tmp_path)


def test_code_of_a_tokenizer_is_not_run_by_default(tmp_path: Path) -> None:
    """An `auto_map` in its configuration has no effect."""
    directory = saved(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own_code.Own", "own_code.Own"]}
    config["tokenizer_class"] = "Own"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "own_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    with contextlib.suppress(ModelError):
        ChatTokenizer.from_files(directory)
    assert not (tmp_path / "ran").exists()


def test_threads_may_share_a_tokenizer() -> None:
    """Concurrent encoding, rendering and decoding give the results of sequential calls."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    wrong: list[str] = []

    def work(name: str) -> None:
        text = name * 50
        for _ in range(100):
            if tokenizer.decode(tokenizer.encode(text)) != text:
                wrong.append(name)
            if not tokenizer.render_chat([{"role": "user", "content": name}]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_plain_text_begins_with_the_first_token_of_the_model() -> None:
    """Unless the caller has rendered it already."""
    tokenizer = byte_tokenizer()
    tokenizer.hugging_face._tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    assert tokenizer.encode("AB") == (256, 65, 66)
    assert tokenizer.encode("AB", add_special_tokens=False) == (65, 66)


def test_one_thread_encodes_at_a_time_with_a_tokenizer_without_a_fast_form() -> None:
    """Such a tokenizer changes its state while it encodes."""
    fast, locks, is_held = byte_tokenizer().hugging_face, list[Any](), list[bool]()

    class Slow:
        is_fast, apply_chat_template = False, PreTrainedTokenizerBase.apply_chat_template

        def __getattr__(self, name: str) -> Any:
            return getattr(fast, name)

        def __len__(self) -> int:
            return len(fast)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            is_held.extend(lock.locked() for lock in locks)
            return fast.encode(*args, **kwargs)

    tokenizer = ChatTokenizer(Slow())
    locks.append(tokenizer._lock)
    assert tokenizer.encode("AB") == (65, 66)
    assert is_held == [True]
