"""Flaws that set an episode's reward to 0: known answers, through a worker and a template."""

import asyncio
import json

import pytest

from core import errors
from envs import Reward
from grpo_async import Config, LowEffort, RolloutWorker, Slot
from rollout.episode import Episode, Turn
from rollout.messages import load_tokenizer
from rollout.response import Response
from rollout.sampler import Sampler
from settings import reader
from settings.config import Sampling
from support import chats
from support.configs import changed
from support.samples import asking

NAMES = ("reasoning_is_answer", "empty_answer", "inner_eos", "think_tags")
FINE = ("it is 4</think>4<|im_end|>",)
CALL = Response("x", "look it up", "", [{"type": "function_call", "name": "f", "arguments": "{}"}])
ON, OFF, SILENT = {"enable_thinking": True}, {"enable_thinking": False}, None
# Its prompts open or close the reasoning in the same places as Nemotron's template.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>{{ '\n' if enable_thinking else '</think>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with TEMPLATE, whose model may end an answer with either token."""
    folder = tmp_path_factory.mktemp("nemotron")
    tokenizer = chats.make_tokenizer(TEMPLATE, chats.CHATML, "<|im_end|>")
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)


@pytest.mark.parametrize("kwargs", [ON, OFF])
def test_the_template_opens_a_thought_as_nemotrons_does(model, kwargs):
    asked = [{"role": "user", "content": "2 + 2?"}]
    how = {"tokenize": False, "add_generation_prompt": True} | kwargs
    ours, theirs = load_tokenizer(model), chats.real("nemotron_3_ultra")
    ends = [t.apply_chat_template(asked, **how).rpartition("assistant")[2] for t in (ours, theirs)]
    assert ends[0] == ends[1] != ""


def played(model: str, *texts: tuple[str, ...], kwargs: dict | None = ON) -> list[Turn]:
    """Turns with these answers, of pieces that are tokenised by themselves; SILENT: a bare prompt.

    An answer without an end token is cut off.
    """
    tokenizer = load_tokenizer(model)
    left = list(texts)

    def say(request) -> tuple[list[int], str]:
        ids = sum((tokenizer.encode(t, add_special_tokens=False) for t in left.pop(0)), [])
        return ids, "stop" if ids and ids[-1] in tokenizer.all_special_ids else "length"

    async def play() -> list[Turn]:
        sampling = Sampling(chat_template_kwargs=kwargs or {})
        sampler = Sampler(chats.Scripted(say), tokenizer, sampling, 0, [], validation=False)
        asked = [{"role": "user", "content": "2 + 2?"}]
        prompt = sampler.render(asked) if kwargs else tokenizer.encode("2 + 2? ")
        return [turn for _ in texts for turn in await sampler.generate(prompt)]

    return asyncio.run(play())


def finish(model: str, episodes: list[Episode], folder, question: str = "2 + 2?", **fields):
    """The samples and lines that a worker makes of them."""
    cfg = changed(Config(), model=model, run_dir=str(folder), prompts_per_step=4, **fields)
    row = asking(question, "math", _line=5)
    _, samples, lines = RolloutWorker(cfg).finish(row, Slot(9), episodes)
    return samples, [json.loads(line) for line in lines.splitlines()]


@pytest.mark.parametrize(("texts", "kwargs", "expected"), [
    ([FINE], ON, ""),
    ([FINE, FINE], ON, ""),
    # The thought as the answer: in any turn, whatever white space is around it.
    ([("it is 4</think> it is 4\n<|im_end|>",)], ON, "reasoning_is_answer"),
    ([("4</think>4<|im_end|>",), FINE], ON, "reasoning_is_answer"),
    ([("It is 4</think>it is 4<|im_end|>",)], ON, ""),
    ([("</think>4<|im_end|>",)], ON, ""),
    # Nothing said in the last turn.
    ([("it is 4</think> \n<|im_end|>",)], ON, "empty_answer"),
    ([("it is 4</think><|im_end|>",), FINE], ON, ""),
    ([FINE, ("</think><|im_end|>",)], ON, "empty_answer"),
    ([("<|im_end|>",)], OFF, "empty_answer"),
    # An end token that is not the tokenizer's own, or not at the end.
    ([("it is 4</think>4<|endoftext|>",)], ON, "inner_eos"),
    ([("it is<|endoftext|> 4</think>4<|im_end|>",)], ON, "inner_eos"),
    ([("it is 4</think>4<|im_end|>5<|im_end|>",)], ON, "inner_eos"),
    ([("it is 4</think>4<|endoftext|>",), FINE], ON, "inner_eos"),
    ([("it is 4</think>4",)], ON, ""),  # cut off in its answer
    # Tags: the prompt has opened the thought.
    ([("it is 4",)], ON, "think_tags"),  # cut off in its thought
    ([("it is 4<|im_end|>",)], ON, "think_tags"),
    ([("<think>it is 4</think>4<|im_end|>",)], ON, "think_tags"),
    ([("it is</think> 4</think>4<|im_end|>",)], ON, "think_tags"),
    ([("it is 4</thi", "nk>4<|im_end|>")], ON, "think_tags"),  # spelled
    ([("<thi", "nk>it is 4</think>4<|im_end|>")], ON, "think_tags"),
    ([("it is 4</think>4 <th<|im_end|>",)], ON, ""),
    ([FINE, ("it is 4<|im_end|>",)], ON, "think_tags"),
    # The prompt has closed it.
    ([("4<|im_end|>",)], OFF, ""),
    ([("it is 4</think>4<|im_end|>",)], OFF, "think_tags"),
    ([("<think>it is 4</think>4<|im_end|>",)], OFF, "think_tags"),
    # The prompt does neither.
    ([("4<|im_end|>",)], SILENT, ""),
    ([("<think>it is 4</think>4<|im_end|>",)], SILENT, ""),
    ([("it is 4</think>4<|im_end|>",)], SILENT, "think_tags"),
    ([("<think>it is 4<|im_end|>",)], SILENT, "think_tags"),
    # Several.
    ([("4</think>4<|endoftext|>",)], ON, "reasoning_is_answer inner_eos"),
    ([("4</thi", "nk>4<|endoftext|>")], ON, "reasoning_is_answer inner_eos think_tags"),
])  # fmt: skip
def test_each_flaw_is_found_and_costs_the_reward(model, tmp_path, texts, kwargs, expected):
    """By its name alone; the environment's score stays, and a line says which flaw it was."""
    found = set(expected.split())
    for name in NAMES:
        turns = played(model, *texts, kwargs=kwargs)
        episodes = [Episode(turns, Reward(1.0, {"mine": 2}))]
        samples, (line,) = finish(model, episodes, tmp_path, zero_rewards=(name,))
        assert {s.reward for s in samples} == {float(name not in found)} == {line["reward"]}, name
        assert {s.score for s in samples} == {1.0}
        assert line["info"] == {"mine": 2, name: name in found}
        assert samples[-1].components == {"mine": 2.0, name: float(name in found)}


def test_a_reward_is_zero_before_it_is_compared(model, tmp_path):
    """The others of the group are compared with 0; the score is the environment's."""
    bad, good, wrong = (played(model, t) for t in (("it is 4<|im_end|>",), FINE, FINE))
    values = zip((bad, good, wrong), (1.0, 1.0, 0.0), strict=True)
    episodes = [Episode(turns, Reward(value)) for turns, value in values]
    samples, _ = finish(model, episodes, tmp_path, zero_rewards=NAMES)
    assert [s.reward for s in samples] == [0.0, 1.0, 0.0]
    assert [s.score for s in samples] == [1.0, 1.0, 0.0]
    assert [s.advantage for s in samples] == pytest.approx([-0.7071, 1.0, -0.7071], abs=1e-4)


def test_without_names_nothing_is_looked_at(model, tmp_path, monkeypatch):
    def looks(*_):
        raise LookupError

    monkeypatch.setattr("rollout.zero_rewards.mark", looks)
    episodes = [Episode(played(model, ("<|endoftext|>",)), Reward(1.0)) for _ in range(2)]
    samples, lines = finish(model, episodes, tmp_path)
    assert [s.reward for s in samples] == [1.0, 1.0] and not lines[0]["info"]
    with pytest.raises(LookupError):
        finish(model, episodes, tmp_path, zero_rewards=NAMES)


@pytest.mark.parametrize(("said", "expected"), [
    (CALL, ""),
    (Response("x", "look it up", "look it up", CALL.tool_calls), "reasoning_is_answer"),
    (Response("x", "look it up", ""), "empty_answer"),
    (Response("x", "", ""), "empty_answer"),
    (Response("x", "", "4"), ""),
])  # fmt: skip
def test_what_a_parser_read_is_judged(model, tmp_path, said, expected):
    """A call is an answer, and what is said beside it may repeat the thought."""
    (turn,) = played(model, FINE)
    turn.parsed = said
    (sample,), (line,) = finish(model, [Episode([turn], Reward(1.0))], tmp_path, zero_rewards=NAMES)
    assert sample.reward == float(not expected)
    assert [name for name in NAMES if line["info"][name]] == expected.split()


def test_low_effort_shapes_before_a_flaw_costs_all(model, tmp_path):
    """A bonus is lost with the reward, and a long flawed answer keeps no penalty, as in NeMo-RL."""
    marker = "{reasoning effort: efficient}"
    rule = LowEffort(weight=1.0, tokens=20, marker=marker)
    long = ("it is 4" * 9 + "<|im_end|>",)
    episodes = [Episode(played(model, t), Reward(1.0)) for t in (FINE, ("4<|im_end|>",), long)]
    fields = {"low_effort": rule, "zero_rewards": NAMES}
    samples, _ = finish(model, episodes, tmp_path, f"2 + 2? {marker}", **fields)
    assert samples[0].reward > 1.0
    assert [str(s.reward) for s in samples[1:]] == ["0.0", "0.0"]
    shaped, _ = finish(model, episodes, tmp_path, f"2 + 2? {marker}", low_effort=rule)
    assert shaped[1].reward > 1.0 > 0.0 > shaped[2].reward


def test_penalties_on_advantages_stay_beside_it(model, tmp_path):
    turns = played(model, ("a</think>b</think>c<|im_end|>",))
    episodes = [Episode(turns, Reward(1.0)), Episode(played(model, FINE), Reward(1.0))]
    fields = {"zero_rewards": NAMES, "penalties": {"thinking": -5.0}}
    samples, _ = finish(model, episodes, tmp_path, **fields)
    assert [s.reward for s in samples] == [0.0, 1.0]
    assert samples[0].flawed("thinking").any() and not samples[1].flawed("thinking").any()


def test_a_flaw_hides_no_reward_that_is_no_number(model, tmp_path):
    episodes = [Episode(played(model, ("4<|im_end|>",)), Reward(float("nan")))] * 2
    with pytest.raises(ValueError, match="rewards must be finite"):
        finish(model, episodes, tmp_path, zero_rewards=NAMES)


def test_a_model_without_generation_config_ends_as_its_tokenizer_does(model, tmp_path):
    folder = tmp_path / "model"
    load_tokenizer(model).save_pretrained(folder)
    texts = [("4</think>5<|endoftext|>",), ("4</think>5<|im_end|>6<|im_end|>",)]
    rewards = []
    for text in texts:
        episode = Episode(played(str(folder), text), Reward(1.0))
        (sample,), _ = finish(str(folder), [episode], tmp_path, zero_rewards=("inner_eos",))
        rewards.append(sample.reward)
    assert rewards == [1.0, 0.0]


def test_the_names_are_checked_in_files_and_flags(tmp_path):
    path = tmp_path / "config.py"
    path.write_text('advantage = {"zero_rewards": ("empty_answer", "inner_eos")}\n')
    assert reader.read(Config, path).advantage.zero_rewards == ("empty_answer", "inner_eos")
    flags = ["--config", str(path), "--advantage.zero_rewards", "think_tags", "empty_answer"]
    cfg = reader.load(Config, flags, default="configs/tiny.py")
    assert cfg.advantage.zero_rewards == ("think_tags", "empty_answer")
    path.write_text('advantage = {"zero_rewards": ("empty",)}\n')
    with pytest.raises(errors.InputError, match=r"config.py:1.*'empty'.*reasoning_is_answer"):
        reader.read(Config, path)
