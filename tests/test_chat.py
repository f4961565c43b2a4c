"""Conversations: each turn reads only what is new, and a slip or an interrupt ends none."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fuzz_cli
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold import FoldedCache
from kvfold.formats import pair
from kvfold.integrations.transformers.conversation import Conversation

Small = tuple[PreTrainedModel, PreTrainedTokenizerBase]
LONG = "The keeper of the light wrote down that it rained all day. " * 12


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "FIT_TOKENS", 70)


class Reads:
    """How many tokens each turn read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    @contextmanager
    def __call__(self, tokens: int) -> Iterator[Callable[[int], None]]:
        self.read.append(0)

        def count(some: int) -> None:
            self.read[-1] += some

        yield count
        assert self.read[-1] == tokens


def _talk(small: Small, format: str = "kvfold-3", **options: Any) -> Conversation:
    return Conversation(*small, lambda: FoldedCache(small[0].config, format), **options)


def _rendered(small: Small, messages: list[dict[str, str]]) -> list[int]:
    return small[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.contract
def test_a_turn_reads_what_is_new(small: Small) -> None:
    talk, reads, heard = _talk(small), Reads(), list[str]()
    first = talk.ask(LONG, 12, say=heard.append, reading=reads)
    held = talk.cache.get_seq_length()
    second = talk.ask("And then?", 12, say=heard.append, reading=reads)
    assert "".join(heard) == first.text + second.text
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert reads.read[0] > 150
    assert reads.read[1] < 30
    assert talk.cache.get_seq_length() > held + reads.read[1]
    assert talk.cache.report().layers[0].format == "kvfold-3"
    # What the cache holds is the conversation as the model's template has it.
    assert talk._ids[0].tolist()[: len(rendered := _rendered(small, talk.messages[:3]))] == rendered
    assert talk._ids.shape[1] == talk.cache.get_seq_length()
    fresh = FoldedCache(small[0].config, "kvfold-3")
    answered = Conversation(*small, lambda: fresh, talk.messages[:2]).ask("And then?", 12)
    assert answered.text == second.text


def test_a_template_that_drops_what_was_thought(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier answers are rendered shorter than they were: the cache goes back to where the texts part."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.role == 'user' else 'yes' }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    monkeypatch.setattr(small[1], "chat_template", template)
    talk, reads = _talk(small, "turboquant-4"), Reads()
    talk.ask(LONG, 12, reading=reads)
    talk.ask("And then?", 12, reading=reads)
    assert reads.read[1] < 30  # not the whole text
    rendered = small[1].apply_chat_template(talk.messages[:3], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert talk._ids[0, : len(rendered)].tolist() == rendered
    assert talk._ids.shape[1] == talk.cache.get_seq_length()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupt_keeps_what_was_said(small: Small, after: int) -> None:
    talk, heard = _talk(small), list[str]()
    talk.ask("Hello.", 4)

    def stop(text: str) -> None:
        heard.append(text)
        if len(heard) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask(LONG, 30, say=stop)
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(heard)} or not "".join(heard)
    assert talk._ids.shape[1] == talk.cache.get_seq_length()
    reads = Reads()
    assert talk.ask("Go on.", 5, reading=reads).tokens
    assert reads.read[0] < 60


def test_it_is_saved_and_goes_on(small: Small, tmp_path: Path) -> None:
    talk = _talk(small)
    talk.ask(LONG, 8)
    talk.save(tmp_path / "talk.json")
    right = talk.ask("And then?", 12)
    other, reads = _talk(small), Reads()
    other.load(tmp_path / "talk.json")
    assert other.ask("And then?", 12, reading=reads).text == right.text
    assert reads.read[0] < 30
    (tmp_path / "talk.json.kv").unlink()  # without its cache the text is read again
    alone, reads = _talk(small), Reads()
    alone.load(tmp_path / "talk.json")
    alone.ask("And then?", 2, reading=reads)
    assert reads.read[0] > 150


@pytest.mark.parametrize("text", ["no JSON", "{}", '[{"role": "user"}]', '[{"role": "god", "content": "x"}]', "[3]"])
def test_files_that_hold_no_conversation(small: Small, tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    talk = _talk(small)
    talk.ask("Hello.", 3)
    before = [*talk.messages]
    with pytest.raises(ValueError, match="holds no conversation"):
        talk.load(tmp_path / "x")
    assert talk.messages == before


def test_a_damaged_cache_changes_nothing(small: Small, tmp_path: Path) -> None:
    talk = _talk(small)
    talk.ask("Hello.", 3)
    talk.save(tmp_path / "talk.json")
    path = tmp_path / "talk.json.kv"
    path.write_bytes(path.read_bytes()[:-100])
    before = [*talk.messages, {"role": "user", "content": "x"}]
    talk.messages = [*before]
    with pytest.raises(ValueError, match=r"\.kv"):
        talk.load(tmp_path / "talk.json")
    assert talk.messages == before


def test_a_model_without_a_template(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small[1], "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        _talk(small)


def test_the_command(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        "Hello.", "", "/help", "/save talk.json", "/forget", "/load talk.json", "/format turboquant-3", "And?", "/nope",
        "/format nope", "/load /nowhere", "/save", "Still there?", "/exit", "never said",
    ]  # fmt: skip
    status, out, err = fuzz_cli.call(
        ["chat", "--model", str(small_folder), "--system", "Be brief.", "--max-new-tokens", "6"], "\n".join(lines)
    )
    assert status == 0, err
    assert len(out.strip().splitlines()) >= 3
    assert err.count("tokens held") >= 4  # three answers and what was loaded
    assert "/load FILE" in err
    assert "/nope: choose one of" in err
    assert "format = 'nope'" in err
    assert "there is no such file" in err
    assert "name a file after it" in err
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert kvfold.FoldedCache.load(tmp_path / "talk.json.kv").get_seq_length()


def test_wrong_options_are_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\n"))
    for options, words in (
        (["--format", "nope"], "format = 'nope'"), (["--dtype", "int8"], "dtype = 'int8'"),
        (["--calibration", "none.safetensors"], "none.safetensors"), (["--model", "/nowhere"], "/nowhere"),
    ):  # fmt: skip
        status, _, err = fuzz_cli.call(["chat", *options])
        assert status == 1
        assert words in err
